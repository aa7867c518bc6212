"""Runs a training with AReaL from the command line, as `treetune train areal` does.

    python -m treetune.trainers.areal TARGET [--num-tasks=N] [--val=N] [--taskset.KEY=VALUE] --config FILE [KEY=VALUE]

TARGET is a task server's address. Any other TARGET is served for the duration of the training; its rollouts are written
to `rollouts` and `validation` in AReaL's `cluster.fileroot`. Keys are AReaL's own, plus ours: `max_turns`,
`turn_discount`, `agent`.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from treetune.errors import CreditError, MissingExtraError, UsageError
from treetune.serve import TaskServerClient
from treetune.system.threads import run_in_background
from treetune.tasksets.target import is_server
from treetune.trainers.held_out import hold_out
from treetune.trainers.launch import (
    OWN,
    TargetTasks,
    TrainRequest,
    declares_lists,
    keys_of_split,
    load_tasks,
    run_command,
    split_override,
)
from treetune.trainers.train_run import ROLLOUTS, VALIDATION

WORKFLOW = "treetune.trainers.areal.TaskServerWorkflow"
OURS = ("--num-tasks", "--val")
OF_TARGET = ("--taskset.", "--train_tasks", "--val_tasks")


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(run, arguments)


def run(arguments: Sequence[str]) -> None:
    try:
        from areal import PPOTrainer
    except ImportError as error:
        raise MissingExtraError(
            f"AReaL cannot be imported: {error}", remedy="install areal as its guide describes"
        ) from error
    request, rest = read_arguments(arguments)
    config = read_config(rest)
    folder = Path(config.cluster.fileroot)
    tasks = load_tasks(request)
    with contextlib.ExitStack() as servers:
        if is_server(request.target):
            rows, validation, url = make_rows(request.target, request.num_tasks), None, request.target
        else:
            rows, validation, declared = select_rows(request, tasks)
            url = servers.enter_context(serve(request, "train", folder / ROLLOUTS))
        first = run_in_background(_read_info(url)).get("contract") or {}
        for credit in {first.get("credit"), *(credit for credit, _ in tasks.credits())}:
            check_config(config, credit)
        own = request.own
        played = describe(config, config.gconfig, url) | own | {"no_turn_credit": why_no_turn_credit(config)}
        options: dict[str, Any] = {"workflow": WORKFLOW, "workflow_kwargs": played}
        if validation is None:
            config.valid_dataset = None
        else:
            apart = servers.enter_context(serve(request, "val" if declared else "train", folder / VALIDATION))
            config.eval_gconfig = config.eval_gconfig.new(n_samples=1)
            evaluation = describe(config, config.eval_gconfig, apart) | own
            options |= {"eval_workflow": WORKFLOW, "eval_workflow_kwargs": evaluation}
        with PPOTrainer(config, train_dataset=rows, valid_dataset=validation) as trainer:
            trainer.train(**options)


def check_config(config: Any, credit: str | None) -> None:
    """Raise if the advantages that the workflow makes would be wrong with these settings of AReaL."""
    turns, actor = credit == "turn", config.actor
    norm, rejection = actor.adv_norm, actor.rejection_sampling
    chunked = norm is not None and "group" in (norm.mean_level, norm.std_level)
    by_row = rejection is not None and rejection.level != "token"
    wrong = {
        "reward_norm": (actor.reward_norm is not None, "the workflow makes rewards advantages of their group"),
        "reward_bias": (actor.reward_bias != 0, "it is added to advantages"),
        "overlong_reward_penalty": (actor.overlong_reward_penalty, "it is added to advantages"),
        "mask_no_eos_with_zero": (actor.mask_no_eos_with_zero, "it removes advantages"),
        "adv_norm": (chunked, "it takes rows in chunks of a fixed size, which one lost episode shifts"),
        "discount": (turns and actor.discount != 1, "each turn is a row, which ends before later turns"),
        "gae_lambda": (turns and actor.gae_lambda != 1, "each turn is a row, which ends before later turns"),
        "kl_ctl": (turns and actor.kl_ctl != 0, "each turn is a row, which ends before the KL of later turns"),
        "ppo_n_minibatches": (turns and actor.ppo_n_minibatches != 1, "all turns of an episode belong in one step"),
        "importance_sampling_level": (turns and actor.importance_sampling_level != "token", "its ratio is by row"),
        "rejection_sampling": (turns and by_row, "it rejects by row"),
    }
    for key, (refused, why) in wrong.items():
        if refused:
            value = getattr(actor, key)
            raise CreditError(f"actor.{key}={value} cannot be used here: {why}", remedy=f"leave actor.{key} out")
    if turns and config.critic is not None:
        raise CreditError("credit: turn cannot be used with a critic", remedy="leave critic out")


def why_no_turn_credit(config: Any) -> str | None:
    """Return why these settings allow no credit by turn, which any task of a server may declare; None if they do."""
    try:
        check_config(config, "turn")
    except CreditError as error:
        return error.message
    return None


def describe(config: Any, gconfig: Any, url: str) -> dict[str, Any]:
    """Return the arguments of the workflow that plays on a task server."""
    return {"gconfig": gconfig, "tokenizer": config.tokenizer_path, "url": url}


def read_arguments(arguments: Sequence[str]) -> tuple[TrainRequest, list[str]]:
    """Split the arguments into the request and AReaL's arguments."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise UsageError("TARGET is missing", remedy="python -m treetune.trainers.areal TARGET --config FILE")
    target, *words = arguments
    ours = {name: value for name, equals, value in (word.partition("=") for word in words) if name in OURS}
    of_target = [word for word in words if word.startswith(OF_TARGET)]
    rest = [word for word in words if not word.startswith((*OF_TARGET, *(f"{name}=" for name in OURS)))]
    request = TrainRequest(
        target=target,
        build=lambda _: {},
        num_tasks=int(ours["--num-tasks"]) if "--num-tasks" in ours else None,
        val=int(ours.get("--val", "0")),
        taskset=dict(split_override(word.removeprefix("--")) for word in of_target),
        overrides=[word for word in rest if not word.startswith("-") and "=" in word],
    )
    return request, [word for word in rest if word.partition("=")[0] not in OWN]


def read_config(words: Sequence[str]) -> Any:
    """Read AReaL's config with its own loader, which refuses keys that AReaL does not have. Our file lacks most of the
    others, so each is added or overridden (hydra's `++`)."""
    from areal.api.cli_args import GRPOConfig, load_expr_config

    config, _ = load_expr_config([re.sub(r"^(?=\w[\w.]*=)", "++", word) for word in words], GRPOConfig)
    return config


def select_rows(request: TrainRequest, tasks: TargetTasks) -> tuple[Any, Any, bool]:
    """Return the rows to train on, the rows to validate with if there are any, and whether these come from
    `val_tasks`."""
    train, declared = tasks
    assert train is not None
    held = hold_out(train, request.val, request.num_tasks, declared)
    if held.train is None:
        raise UsageError(f"{train.name} is endless: how many tasks should it train on?", remedy="pass -n")
    return list_rows(held.train), list_rows(held.val) if held.val else None, declared is not None


def list_rows(indices: Sequence[int]) -> Any:
    """Return one row per task: its index."""
    from datasets import Dataset

    return Dataset.from_list([{"task_index": index} for index in indices])


def make_rows(url: str, number: int | None) -> Any:
    """Return the rows of a server's tasks."""
    if number is None:
        number = run_in_background(_read_info(url)).get("num_tasks")
    if number is None:
        raise UsageError("these tasks never end, or their number is unknown", remedy="pass -n")
    return list_rows(range(number))


async def _read_info(url: str) -> dict[str, Any]:
    async with TaskServerClient(url) as client:
        return await client.info()


@contextlib.contextmanager
def serve(request: TrainRequest, split: str, traces: Path) -> Iterator[str]:
    """Yield the address of a task server for a split of the target, which writes its rollouts to a folder."""
    command = [sys.executable, "-P", "-m", "treetune", "serve", request.target, "--http", "127.0.0.1:0", "--json"]
    command += ["--split", split] if declares_lists(request.target) else []
    command += ["--traces", str(traces), *(f"--{key}={value}" for key, value in keys_of_split(request, split).items())]
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
    raise UsageError(f"the task server ended with {server.wait()}", remedy="its own message is above")


if __name__ == "__main__":
    main()
