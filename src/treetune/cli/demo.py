"""`treetune demo`: a tour in a minute, on a laptop, without a network. It shows each step as a command line and runs
it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec

from treetune.cli.app import run
from treetune.cli.init import read_template
from treetune.cli.options import Json, option
from treetune.cli.output import print_json
from treetune.data.datasets.task_lists import read_declared
from treetune.errors import MissingExtraError, TreetuneError
from treetune.system.folders import FOLDER
from treetune.system.screen import Screen
from treetune.tasksets.target import load_taskset

FILE = Path("count_letters.py")
TARGET = f"{FILE}:CountLetters"
MODELS = {
    "scripted:gold": "always right: is the reward reachable?",
    "scripted:echo": "an echo of the question: does the reward pay for nothing?",
    "scripted:p=0.7": "right 7 times in 10: what a run looks like",
}


def demo_command(
    output: Annotated[Path, option("The folder for its files.", "-o", "--output")] = Path("treetune-demo"),
    num_tasks: Annotated[
        int | None,
        option("How many tasks to evaluate (default: 40; 500 for the random script).", "-n", "--num-tasks", min=1),
    ] = None,
    train: Annotated[
        bool, option("Also train a tiny model, which takes another minute (extra `trl`).", "--train")
    ] = False,
    json: Json = False,
) -> None:
    """Declare a task, draw it lazily, evaluate it with scripts, build it into parquet. It takes a minute and needs no
    network.

    The task is in a file that you can change: run the demo again to see another result.
    """
    example = _find_training() if train else None
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"task_file": str(output / FILE), "runs": {}}
    with chdir(output), redirect_stdout(sys.stderr if json else sys.stdout):
        screen = Screen()
        screen.say("1. A task, declared once", "bold")
        if not FILE.exists():
            FILE.write_text(read_template("demo/count_letters.py"))
        lines = len(FILE.read_text().splitlines())
        screen.say(f"$ cd {shlex.quote(str(output))}")
        screen.say(f"{FILE}: {lines} lines, an infinite taskset with its reward and a tool that a model may call.")
        screen.say("Change it, and run the demo again.")

        screen.say("2. Drawn lazily", "bold")
        _run(screen, "show", TARGET, "-n", "2")

        screen.say("3. Evaluated, by scripts that stand in for a model", "bold")
        for model, about in MODELS.items():
            screen.say(f"# {model} is {about}")
            count = num_tasks or (500 if "p=" in model else 40)  # large enough for a mean close to 0.7
            _run(screen, "eval", TARGET, "-m", model, "-n", str(count), "-r", "2")
            folder = max(Path("runs").iterdir(), key=os.path.getmtime)
            summary = msgspec.json.decode((folder / "summary.json").read_bytes())
            figures = {name: summary[name] for name in ("mean_reward", "mean_reward_all", "stderr")}
            found["runs"][model] = {**figures, "run_dir": str(output / folder)}

        screen.say(
            "4. Built for a trainer: the same questions as a dataset in YAML, built into parquet for verl", "bold"
        )
        _write_dataset()
        for _ in range(2):  # the second time comes from the cache
            _run(screen, "build", "tasks.yaml", "--cache-dir", "cache")
        (taskset,) = read_declared("tasks.yaml", {}, cache_dir="cache")["train"]
        found["parquet"] = taskset.get_parquet_path()

        if example is not None:
            screen.say("5. Trained: GRPO on a tiny model; a task server scores every answer over HTTP", "bold")
            found["training"] = _train(screen, example, output)

        screen.say("Next: change the task and run any of these lines again, or begin your own", "bold")
        screen.say("$ treetune init my-task")
    if json:
        print_json(found)


def _run(screen: Screen, *arguments: str) -> None:
    """Shows a command line and runs it."""
    screen.say(f"$ treetune {shlex.join(arguments)}")
    code = run(list(arguments))
    if code == 130:
        raise KeyboardInterrupt
    if code > 1:
        raise TreetuneError(f"`treetune {arguments[0]}` ended with {code}", remedy="its message is above")


def _write_dataset() -> None:
    tasks = load_taskset(TARGET).select_tasks(200)
    questions = [{"question": task.prompt, "answer": task.ground_truth} for task in tasks]
    rows = Path("questions.jsonl").absolute()  # so that the dataset is found from any folder
    rows.write_bytes(msgspec.json.Encoder().encode_lines(questions))
    Path("tasks.yaml").write_text(read_template("demo/tasks.yaml", rows=msgspec.json.encode(str(rows)).decode()))


def _find_training() -> Path:
    """The folder of examples/train_tiny, in the installed package or in the checkout."""
    if missing := [name for name in ("torch", "trl") if find_spec(name) is None]:
        raise MissingExtraError.of(f"--train: {' or '.join(missing)}", "trl")
    package = FOLDER
    for place in (package, package.parent.parent):
        if (place / "examples" / "train_tiny" / "train.py").exists():
            return place / "examples" / "train_tiny"
    raise TreetuneError("examples/train_tiny is missing", remedy="reinstall treetune, or run from a checkout")


def _train(screen: Screen, example: Path, output: Path) -> dict[str, Any]:
    """Trains from a copy of the example, so that it can be changed and run again; returns the results."""
    folder = Path("train_tiny")
    folder.mkdir(exist_ok=True)
    for file in sorted(example.glob("*.*")):
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    results, log = folder / "results", folder / "training.log"
    words = [str(folder / "train.py"), "--output", str(results)]
    screen.say(f"$ python {shlex.join(words)} 2> {log}")
    with log.open("w") as warnings:
        code = subprocess.run([sys.executable, *words], stderr=warnings).returncode
    if code:
        raise TreetuneError(f"the training ended with {code}", remedy=f"read {output / log}")
    picture = output / results / "curve.svg"
    screen.say(f"{picture}: the reward over the steps")
    return {**msgspec.json.decode((results / "seed-0.json").read_bytes()), "picture": str(picture)}
