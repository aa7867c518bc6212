"""Runs a training with AReaL from the command line, as `treetune train areal` does.

    python -m treetune.trainers.areal TARGET [--num-tasks=N] [--taskset.KEY=VALUE] --config FILE [KEY=VALUE]...

TARGET is a task server's address. Any other TARGET is served for the duration of the training. Keys are AReaL's own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from treetune.errors import MissingExtraError, UsageError
from treetune.serve import TaskServerClient
from treetune.system.threads import run_in_background
from treetune.tasksets.target import is_server
from treetune.trainers.launch import run_command

WORKFLOW = "treetune.trainers.areal.TaskServerWorkflow"


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(run, arguments)


def run(arguments: Sequence[str]) -> None:
    try:
        from areal import PPOTrainer
    except ImportError as error:
        raise MissingExtraError(
            f"AReaL cannot be imported: {error}", remedy="install areal as its guide says"
        ) from error
    target, number, of_target, rest = read_arguments(arguments)
    config = read_config(rest)
    with serve(target, of_target) as url:
        rows = make_rows(url, number)
        given = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path, "url": url}
        with PPOTrainer(config, train_dataset=rows) as trainer:
            trainer.train(workflow=WORKFLOW, workflow_kwargs=given)


def read_arguments(arguments: Sequence[str]) -> tuple[str, int | None, list[str], list[str]]:
    """Split the arguments into the target, the number of tasks, the target's options, and AReaL's arguments."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise UsageError("TARGET is missing", remedy="python -m treetune.trainers.areal TARGET --config FILE")
    target, *words = arguments
    numbers = [word.partition("=")[2] for word in words if word.startswith("--num-tasks=")]
    of_target = [word for word in words if word.startswith("--taskset.")]
    rest = [word for word in words if not word.startswith(("--num-tasks=", "--taskset."))]
    return target, int(numbers[-1]) if numbers else None, of_target, rest


def read_config(words: Sequence[str]) -> Any:
    """Read AReaL's config with its own loader, which refuses unknown keys here."""
    from areal.api.cli_args import GRPOConfig, load_expr_config

    config, _ = load_expr_config(list(words), GRPOConfig)
    return config


def make_rows(url: str, number: int | None) -> Any:
    """Return one row per task: its index."""
    from datasets import Dataset

    if number is None:
        number = run_in_background(_count(url))
    if number is None:
        raise UsageError("these tasks never end, or their number is unknown", remedy="pass -n")
    return Dataset.from_list([{"task_index": index} for index in range(number)])


async def _count(url: str) -> int | None:
    async with TaskServerClient(url) as client:
        count: int | None = (await client.info()).get("num_tasks")
        return count


@contextlib.contextmanager
def serve(target: str, of_target: Sequence[str]) -> Iterator[str]:
    """Yield the address of a task server for the target."""
    if is_server(target):
        yield target
        return
    command = [sys.executable, "-P", "-m", "treetune", "serve", target, "--http", "127.0.0.1:0", *of_target, "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield read_address(server)
    finally:
        server.terminate()
        server.wait()


def read_address(server: subprocess.Popen[bytes]) -> str:
    """Read the JSON object that a server prints when it is ready."""
    printed = b""
    assert server.stdout is not None
    for line in server.stdout:
        printed += line
        with contextlib.suppress(ValueError):
            reported = json.loads(printed)
            if "error" in reported:
                raise UsageError(f"the task server did not start: {reported['error']}", remedy=reported.get("remedy"))
            return str(reported["http"])
    raise UsageError(f"the task server ended with {server.wait()}", remedy="what it said stands above")


if __name__ == "__main__":
    main()
