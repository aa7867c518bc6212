"""`treetune demo`: the whole thing in a minute, on a laptop, without a network."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from treetune.task import Task

TASK = '''"""Counting letters: a taskset that never ends, drawn lazily."""

import random

from treetune import Score, Task, Taskset

WORDS = "strawberry banana committee bookkeeper mississippi raspberry cinnamon balloon".split()


class CountLetters(Taskset):
    INFINITE = True

    def task_at(self, index):
        rng = random.Random(f"{self.seed}/{index}")
        word = rng.choice(WORDS)
        letter = rng.choice(word)
        return Task(
            prompt=f"How many times does the letter {letter} appear in {word}? Answer with just the number.",
            reward_spec={"ground_truth": str(word.count(letter))},
        )

    def reward(self, task, answer):
        found = answer.strip()
        return Score(float(found == task.ground_truth), answer=found, explanation=f"expected {task.ground_truth}")

    def gold(self, task):
        return task.ground_truth
'''


def demo_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the demo puts its files.")] = Path(
        "treetune-demo"
    ),
    num_tasks: Annotated[int, typer.Option("-n", "--num-tasks", min=1, help="How many tasks to evaluate.")] = 40,
    train: Annotated[bool, typer.Option("--train", help="Train a tiny model too: a minute more (extra `trl`)")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Declare a task, draw it lazily, evaluate it with scripts, build it into parquet: a minute, no network.

    The task is written to a file and run from there: change the file, run the demo again, see another result.
    """
    import asyncio
    import shlex

    from treetune.cli.output import console_for, print_json
    from treetune.evaluation.config import Evaluation, read_evaluation
    from treetune.evaluation.display import rollout_line, summary_table
    from treetune.evaluation.run_folder import TRACES, RunFolder, unused
    from treetune.evaluation.runner import Runner, local_host
    from treetune.evaluation.summary import Summary
    from treetune.policies import load_policy
    from treetune.target import taskset_fingerprint

    example = _train_tiny() if train else None
    console = console_for(json)

    def say(text: str, style: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True, style=style)

    output.mkdir(parents=True, exist_ok=True)
    file = output / "count_letters.py"
    say("1. A task, declared once", "bold")
    if file.exists():
        say(f"   {file} is there already and is used as it is.")
    else:
        file.write_text(TASK)
        say(f"   {file}: {len(TASK.splitlines())} lines, an infinite taskset with its reward.")

    say("2. Drawn lazily", "bold")
    target = {"id": f"{file}:CountLetters"}

    def evaluation_with(model: str) -> Evaluation:
        return read_evaluation({"taskset": target, "model": model, "num_tasks": num_tasks, "num_rollouts": 2})

    evaluation = evaluation_with("scripted:p=0.7")
    began = time.perf_counter()
    first = evaluation.taskset.select_tasks(3)
    say(f"   3 of infinitely many tasks in {1000 * (time.perf_counter() - began):.1f} ms:")
    for task in first:
        say(f"   [{task.idx}] {task.prompt}  ->  {task.ground_truth}")

    say(f"3. Evaluated: {num_tasks} tasks x 2 rollouts, by scripts that stand in for a model", "bold")
    results: dict[str, Summary] = {}
    paths: dict[str, Path] = {}
    for model, about in {
        "scripted:gold": "always right: is the reward reachable?",
        "scripted:echo": "repeats the question: does the reward pay for nothing?",
        "scripted:p=0.7": "right 7 times in 10: what a run looks like",
    }.items():
        evaluation = evaluation_with(model)
        path = unused(output / "runs" / model.replace(":", "-"))
        fingerprint = taskset_fingerprint(evaluation.taskset)
        with RunFolder.create(path, TRACES, evaluation.resolved(), fingerprint) as run:
            policy = load_policy(model, evaluation.taskset)
            results[model] = asyncio.run(Runner(evaluation, run, local_host(evaluation, policy)).run())
        paths[model] = path
        mean, error = results[model].mean_reward, results[model].stderr
        say(f"   {model:<15} mean reward {mean or 0:.3f} ± {error or 0:.3f}   ({about})")
    say("   the last rollouts of the last run:")
    for trace in deque(TRACES.read(path), maxlen=4):
        console.print("   ", rollout_line(trace), sep="")
    console.print(summary_table(results[model]))

    say("4. Built for a trainer: the same questions as a dataset, in YAML, to parquet that verl reads", "bold")
    tasks, parquet = _build(say, output, evaluation.taskset.select_tasks(200))

    trained = None
    if example is not None:
        say("5. Trained: GRPO on a tiny model, every answer scored by a task server over HTTP", "bold")
        trained = _train(say, example, output / "train_tiny")

    say(f"{5 + train}. Files", "bold")
    say(f"   {parquet}  the rows, in the cache")
    if trained is not None:
        say(f"   {trained['picture']}  how the training went")
    for name, about in {
        "config.yaml": "runs this evaluation again: treetune eval " + shlex.quote(str(path / "config.yaml")),
        "traces.jsonl": "every rollout: messages, reward, answer, timing",
        "summary.json": "mean, standard error, pass@k, per outcome",
    }.items():
        say(f"   {path / name}  {about}")

    say("Try next", "bold")
    name = shlex.quote(f"{file}:CountLetters")
    say(f"   treetune build {shlex.quote(str(tasks))}")
    say(f"   edit {file}, then: treetune eval {name} -m scripted:gold -n 20")
    say("   treetune init my-task")
    if json:
        print_json(
            {
                "task_file": str(file),
                "parquet": parquet,
                "runs": {
                    model: {"mean_reward": summary.mean_reward, "stderr": summary.stderr, "run_dir": str(paths[model])}
                    for model, summary in results.items()
                },
                **({"training": trained} if trained else {}),
            }
        )


def _train_tiny() -> Path:
    """The folder of examples/train_tiny: in the package where it was installed, else in the checkout."""
    from importlib.util import find_spec

    import treetune
    from treetune.errors import MissingExtraError, TreetuneError

    if missing := [name for name in ("torch", "trl") if find_spec(name) is None]:
        raise MissingExtraError.of(f"--train: {' or '.join(missing)}", "trl")
    package = Path(treetune.__file__).parent
    for place in (package, package.parent.parent):
        if (place / "examples" / "train_tiny" / "train.py").exists():
            return place / "examples" / "train_tiny"
    raise TreetuneError("examples/train_tiny was not installed", remedy="install treetune anew, or run from a checkout")


def _train(say: Callable[..., None], example: Path, folder: Path) -> dict[str, object]:
    """Trains from a copy of the example, so that it can be changed and run again; gives what the run found."""
    import shutil
    import subprocess
    import sys

    import msgspec

    from treetune.errors import TreetuneError

    folder.mkdir(exist_ok=True)
    for file in sorted(example.glob("*.*")):
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    script, results, log = folder / "train.py", folder / "results", folder / "training.log"
    say(f"   {script}: a copy of examples/train_tiny; its warnings are in {log}")
    with (
        log.open("w") as warnings,
        subprocess.Popen(
            [sys.executable, script, "--output", results], stdout=subprocess.PIPE, stderr=warnings, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            say(f"   {line.rstrip()}")
    if process.returncode:
        raise TreetuneError(f"the training ended with {process.returncode}", remedy=f"read {log}")
    found: dict[str, object] = msgspec.json.decode((results / "seed-0.json").read_bytes())
    return {**found, "picture": str(results / "curve.svg")}


_TASKS_YAML = """# treetune build {yaml}
train_tasks:
  - loading_params:
      args: [json]
      kwargs: {{data_files: {rows}, split: train}}
    prompt_template: "{{question}}"
    system_prompt: "Answer with just the number."
    ground_truth: answer
    data_source: count-letters
"""


def _build(say: Callable[..., None], output: Path, tasks: list[Task]) -> tuple[Path, str]:
    """Write the tasks as a plain dataset, declare it, and build it twice: once for real, once from the cache."""
    import msgspec

    from treetune.datasets.declared import read_declared

    rows, yaml = (output / "questions.jsonl").resolve(), output / "tasks.yaml"
    encoded = [msgspec.json.encode({"question": task.prompt, "answer": task.ground_truth}) for task in tasks]
    rows.write_bytes(b"".join(row + b"\n" for row in encoded))
    yaml.write_text(_TASKS_YAML.format(yaml=yaml, rows=msgspec.json.encode(str(rows)).decode()))
    for what in ("built", "asked again"):
        (taskset,) = read_declared(str(yaml), {}, cache_dir=output / "cache").lists["train"]
        began = time.perf_counter()
        sidecar, path, hit = taskset.build()
        spent = 1000 * (time.perf_counter() - began)
        say(f"   {what}: {sidecar.rows} rows, {'hit' if hit else 'miss'}, {spent:.1f} ms")
    return yaml, str(path)
