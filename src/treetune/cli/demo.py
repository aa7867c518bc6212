"""`treetune demo`: the whole thing in a minute, on a laptop, without a network."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec

import treetune
from treetune import evaluation as evaluating
from treetune.cli.display import rollout_line, summary_table
from treetune.cli.init import read_template
from treetune.cli.options import Json, option
from treetune.cli.output import Screen, print_json
from treetune.errors import MissingExtraError, TreetuneError
from treetune.policies import load_policy
from treetune.task import Task

MODELS = {
    "scripted:gold": "always right: is the reward reachable?",
    "scripted:echo": "repeats the question: does the reward pay for nothing?",
    "scripted:p=0.7": "right 7 times in 10: what a run looks like",
}


def demo_command(
    output: Annotated[Path, option("Where its files go.", "-o", "--output")] = Path("treetune-demo"),
    num_tasks: Annotated[int, option("How many tasks to evaluate.", "-n", "--num-tasks", min=1)] = 40,
    train: Annotated[bool, option("Train a tiny model too: a minute more (extra `trl`)", "--train")] = False,
    json: Json = False,
) -> None:
    """Declare a task, draw it lazily, evaluate it with scripts, build it into parquet: a minute, no network.

    The task is written to a file and run from there: change the file, run the demo again, see another result.
    """
    example = _find_training() if train else None
    screen = Screen(json)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "count_letters.py"
    screen.say("1. A task, declared once", "bold")
    if file.exists():
        screen.say(f"   {file} is there already and is used as it is.")
    else:
        file.write_text(read_template("demo/count_letters.py"))
        screen.say(f"   {file}: {len(file.read_text().splitlines())} lines, an infinite taskset with its reward.")

    screen.say("2. Drawn lazily", "bold")
    target = f"{file}:CountLetters"
    began = time.perf_counter()
    taskset = treetune.load_taskset(target)
    first = taskset.select_tasks(3)
    screen.say(f"   3 of infinitely many tasks in {1000 * (time.perf_counter() - began):.1f} ms:")
    for task in first:
        screen.say(f"   [{task.idx}] {task.prompt}  ->  {task.ground_truth}")

    screen.say(f"3. Evaluated: {num_tasks} tasks x 2 rollouts, by scripts that stand in for a model", "bold")
    runs = {}
    for model, about in MODELS.items():
        path, summary = _evaluate(target, model, num_tasks, output / "runs" / model.replace(":", "-"))
        runs[model] = {"mean_reward": summary.mean_reward, "stderr": summary.stderr, "run_dir": str(path)}
        mean, error = summary.mean_reward or 0, summary.stderr or 0
        screen.say(f"   {model:<15} mean reward {mean:.3f} ± {error:.3f}   ({about})")
    screen.say("   the last rollouts of the last run:")
    for trace in deque(evaluating.TRACES.read(path), maxlen=4):
        screen.print("   ", rollout_line(trace), sep="")
    screen.print(summary_table(summary))

    screen.say("4. Built for a trainer: the same questions as a dataset, in YAML, to parquet that verl reads", "bold")
    tasks, parquet = _build(screen, output, taskset.select_tasks(200))

    trained = None
    if example is not None:
        screen.say("5. Trained: GRPO on a tiny model, every answer scored by a task server over HTTP", "bold")
        trained = _train(screen, example, output / "train_tiny")

    screen.say(f"{5 + train}. Files", "bold")
    screen.say(f"   {parquet}  the rows, in the cache")
    if trained is not None:
        screen.say(f"   {trained['picture']}  how the training went")
    again = f"treetune eval {shlex.quote(str(path / 'config.yaml'))}"
    screen.say(f"   {path / 'config.yaml'}  runs this evaluation again: {again}")
    screen.say(f"   {path / 'traces.jsonl'}  every rollout: messages, reward, answer, timing")
    screen.say(f"   {path / 'summary.json'}  mean, standard error, pass@k, per outcome")

    screen.say("Try next", "bold")
    screen.say(f"   treetune build {shlex.quote(str(tasks))}")
    screen.say(f"   edit {file}, then: treetune eval {shlex.quote(target)} -m scripted:gold -n 20")
    screen.say("   treetune init my-task")
    if json:
        training = {"training": trained} if trained else {}
        print_json({"task_file": str(file), "parquet": parquet, "runs": runs, **training})


def _evaluate(target: str, model: str, num_tasks: int, path: Path) -> tuple[Path, evaluating.Summary]:
    config = {"taskset": {"id": target}, "model": model, "num_tasks": num_tasks, "num_rollouts": 2}
    evaluation = evaluating.read_evaluation(config)
    taskset, path = evaluation.taskset, evaluating.unused_path(path)
    with evaluating.RunFolder.create(path, evaluating.TRACES, evaluation) as run:
        host = evaluating.local_host(evaluation, load_policy(model, taskset))
        return path, asyncio.run(evaluating.Runner(evaluation, run).run(host))


def _build(screen: Screen, output: Path, tasks: list[Task]) -> tuple[Path, str]:
    """Writes the tasks as a plain dataset, declares it, and builds it twice: once for real, once from the cache."""
    from treetune.datasets.declared import read_declared

    rows, yaml = (output / "questions.jsonl").resolve(), output / "tasks.yaml"
    questions = [{"question": task.prompt, "answer": task.ground_truth} for task in tasks]
    rows.write_bytes(msgspec.json.Encoder().encode_lines(questions))
    yaml.write_text(read_template("demo/tasks.yaml", yaml=str(yaml), rows=msgspec.json.encode(str(rows)).decode()))
    for what in ("built", "asked again"):
        (taskset,) = read_declared(str(yaml), {}, cache_dir=output / "cache")["train"]
        began = time.perf_counter()
        sidecar, path, hit = taskset.build()
        spent = 1000 * (time.perf_counter() - began)
        screen.say(f"   {what}: {sidecar.rows} rows, {'hit' if hit else 'miss'}, {spent:.1f} ms")
    return yaml, str(path)


def _find_training() -> Path:
    """The folder of examples/train_tiny: in the package where it was installed, else in the checkout."""
    if missing := [name for name in ("torch", "trl") if find_spec(name) is None]:
        raise MissingExtraError.of(f"--train: {' or '.join(missing)}", "trl")
    package = Path(treetune.__file__).parent
    for place in (package, package.parent.parent):
        if (place / "examples" / "train_tiny" / "train.py").exists():
            return place / "examples" / "train_tiny"
    raise TreetuneError("examples/train_tiny was not installed", remedy="install treetune anew, or run from a checkout")


def _train(screen: Screen, example: Path, folder: Path) -> dict[str, object]:
    """Trains from a copy of the example, so that it can be changed and run again; gives what the run found."""
    folder.mkdir(exist_ok=True)
    for file in sorted(example.glob("*.*")):
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    script, results, log = folder / "train.py", folder / "results", folder / "training.log"
    screen.say(f"   {script}: a copy of examples/train_tiny; its warnings are in {log}")
    with log.open("w") as warnings:
        code = subprocess.run([sys.executable, script, "--output", results], stderr=warnings).returncode
    if code:
        raise TreetuneError(f"the training ended with {code}", remedy=f"read {log}")
    found: dict[str, object] = msgspec.json.decode((results / "seed-0.json").read_bytes())
    return {**found, "picture": str(results / "curve.svg")}
