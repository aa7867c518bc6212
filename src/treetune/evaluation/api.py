"""`treetune.evaluate`: an evaluation as one call, with everything that `treetune eval` can do.

    run = treetune.evaluate("arithmetic", "scripted:p=0.7", num_tasks=50, num_rollouts=4)
    run = treetune.evaluate(Doubles, lambda request: "4", taskset={"level": 2})
    run = await treetune.evaluate_async("gsm8k", "Qwen/Qwen3-4B", endpoint={"base_url": "http://127.0.0.1:8000/v1"})

It returns the `Run`, which is on disk like any other. Failed rollouts are part of it and raise nothing; an evaluation
that cannot run at all raises an exception.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from treetune.config import code_files
from treetune.config.code_files import is_of_file, source_of
from treetune.config.interpolation import deep_merge
from treetune.config.plugins import tasksets
from treetune.config.structs import to_plain
from treetune.config.trust import USER, is_installed
from treetune.core.policy import Policy, Request
from treetune.core.taskset import Taskset
from treetune.errors import UsageError
from treetune.evaluation.config import EvalConfig, Evaluation, read_config, refuse_foreign_model, take_up
from treetune.evaluation.plan import EvalPlan, Watch
from treetune.loggers import open_loggers
from treetune.models.scripted import given_policy
from treetune.runs.folder import name_run
from treetune.runs.run import Run
from treetune.system.threads import call_apart, run_apart
from treetune.tasksets.target import read_target

Target = str | Path | Taskset[Any, Any] | type[Taskset[Any, Any]]
Model = str | Policy | Callable[[Request], Any]


def evaluate(
    target: Target | None = None,
    model: Model | None = None,
    *,
    num_tasks: int | None = None,
    num_rollouts: int | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    rescore: bool = False,
    split: str | None = None,
    workers: int | None = None,
    trust: bool = False,
    progress: bool | None = None,
    log: Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Evaluates a model on a taskset; waits for the end and returns the run.

    `target` is a TARGET as on the command line, a path, or a `Taskset` (an instance or a class). `model` is any value
    of `-m`, a policy, or a function that maps a `Request` to text or a `Completion`. `output` is the run folder; with
    `resume` that run is continued, and `target` may be absent. `keys` are config keys: `sampling={"temperature": 0.7}`,
    `taskset={"level": 2}`, `max_concurrent=8`. `progress` shows the display of `treetune eval` on standard error; by
    default it is shown if that is a terminal. `log` names loggers: wandb, mlflow, tensorboard.

    It works in a script, in a thread, and within a running event loop, as in a notebook. After Ctrl-C, `resume=True`
    continues the run.
    """
    _refuse_while_loaded(sys._getframe(1))
    begun: list[Path] = []
    options: dict[str, Any] = dict(resume=resume, rescore=rescore, split=split, workers=workers, trust=trust, log=log)
    options |= dict(output=output, progress=progress, num_tasks=num_tasks, num_rollouts=num_rollouts, **keys)
    try:
        return run_apart(evaluate_async(target, model, _begun=begun, **options))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        for path in begun:
            error.add_note(f"resume it with: treetune.evaluate(output={str(path)!r}, resume=True)")
        raise


def _refuse_while_loaded(caller: FrameType) -> None:
    """Refuses a call at the top level of a script that evaluates its own class. The script is loaded again as the file
    of that class, so the call would run again and wait for the first one."""
    module = str(caller.f_globals.get("__name__"))
    if caller.f_code.co_name == "<module>" and module.startswith(f"{code_files.__name__}."):
        problem = f"{caller.f_code.co_filename} calls treetune.evaluate whenever it is loaded"
        raise UsageError(problem, remedy='put the call below: if __name__ == "__main__":')


async def evaluate_async(
    target: Target | None = None,
    model: Model | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    rescore: bool = False,
    split: str | None = None,
    workers: int | None = None,
    trust: bool = False,
    progress: bool | None = None,
    log: Sequence[str] = (),
    _begun: list[Path] | None = None,
    **keys: Any,
) -> Run:
    """Like `evaluate`, with the same arguments, but within an event loop, which plays the rollouts."""
    path = None if output is None else Path(output).expanduser()

    def begin() -> EvalPlan:
        loggers = open_loggers([log] if isinstance(log, str) else log)
        policy = given_policy(model) if model is not None and not isinstance(model, str) else None
        name = policy.name if policy is not None else model
        evaluation = _read(target, {**keys, "model": name}, path if resume else None, split, trust)
        plan = EvalPlan(evaluation, policy=policy, workers=workers, loggers=loggers)
        plan.check()
        plan.load()
        folder = path or name_run(plan.evaluation.taskset.name, plan.model)
        plan.begin(folder, resume=resume, rescore=rescore, trust=trust)
        return plan

    # Runs in a thread: this may load code, ask a server, try a sandbox, or read a model of several gigabytes.
    plan: EvalPlan = await call_apart(begin, late=lambda plan: plan.run.__exit__())
    with plan.run as folder:
        if _begun is not None:
            _begun.append(folder.path)
        await plan.play(_display(sys.stderr.isatty() if progress is None else progress))
    return Run(folder.path)


def _read(
    target: Target | None, keys: dict[str, Any], resumed: Path | None, split: str | None, trust: bool
) -> Evaluation:
    """Reads the evaluation of a target, or of the run folder that is resumed."""
    overrides: dict[str, str] = {}
    if target is None:
        if resumed is None:
            raise UsageError("nothing to evaluate", remedy="pass a target, or output= and resume=True")
        target, overrides = take_up(resumed, trust)
    elif trust and not isinstance(target, Taskset | type):
        overrides = {"taskset.trust": "true"}
    made: Taskset[Any, Any] | type[Taskset[Any, Any]] | None = None
    if isinstance(target, Taskset) or (isinstance(target, type) and issubclass(target, Taskset)):
        made = target
        if isinstance(target, Taskset) and "taskset" in keys:
            raise UsageError(
                "taskset= applies only to a taskset that has not been created yet", remedy="create it with these keys"
            )
        data: dict[str, Any] = {"taskset": name_taskset(target)}
    elif isinstance(target, str | Path):
        if keys["model"] is None:
            refuse_foreign_model(str(target), trust)
        data = read_target(str(target), overrides, split)
    else:
        raise UsageError(f"{target!r:.100} cannot be evaluated", remedy="pass a TARGET, a Taskset or its class")
    given = {key: value for key, value in keys.items() if value is not None}
    given = {key: to_plain(value) if isinstance(value, msgspec.Struct) else value for key, value in given.items()}
    data = deep_merge({"model": "", **data}, given)
    source = str(target) if made is None else data["taskset"]["id"]
    return read_config(data, EvalConfig, overrides, source, made)


def name_taskset(taskset: Taskset[Any, Any] | type[Taskset[Any, Any]]) -> dict[str, Any]:
    """Returns the node that names the class of a taskset in the config of a run. A class in a notebook or a function
    has a name that no other process can find."""
    cls = taskset if isinstance(taskset, type) else type(taskset)
    if isinstance(taskset, Taskset) and tasksets.has(taskset.name) and tasksets.resolve(taskset.name, USER) is cls:
        return {"id": taskset.name}
    if (foreign := getattr(cls, "FOREIGN", None)) is not None:
        return {"id": foreign}
    module, file = cls.__module__, source_of(cls)
    of_package = is_installed(module) or ("." in module and not is_of_file(module))
    return {"id": f"{module if of_package or file is None else file}:{cls.__qualname__}"}


def _display(shown: bool) -> Watch | None:
    if not shown:
        return None
    from treetune.evaluation.live import Display  # imports rich, which only a display needs
    from treetune.system.screen import Screen

    return lambda plan, done: Display(Screen(as_json=True), plan.evaluation, done)
