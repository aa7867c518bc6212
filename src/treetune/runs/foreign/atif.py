"""Agent trajectories in ATIF, up to version 1.8: one file, a folder of them, or a Harbor job, with a folder per trial.

A step of the agent is a turn: its message, its calls, and the observations after them. The rewards of a trial are in
Harbor's `result.json` next to it; a trial without a trajectory has only that file. An agent that ran out of time or
tokens, or that refused, counts as measured; any other exception is a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treetune.chat.calls import write_call
from treetune.chat.message import Message
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Timing, Trace
from treetune.runs.foreign.program import (
    ForeignRollout,
    Keys,
    Program,
    Stamp,
    decode,
    files_in,
    number_of,
    numbers_in,
    time_of,
    tokens_of,
    turns_of,
)
from treetune.runs.plain_files import open_regular, read_regular
from treetune.system.digest import digest

_RESULT, _TRAJECTORY = "result.json", "trajectory.json"
_TRIAL = Keys("trial_name")
_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")
_MOST_BYTES = 1 << 30
"""The maximum size of a trajectory in bytes."""
_MEASURED = {
    "AgentTimeoutError": Outcome.TIMEOUT,
    "ContextWindowExceededError": Outcome.TRUNCATED,
    "ContextLengthExceededError": Outcome.TRUNCATED,
    "OutputTokenExceededError": Outcome.TRUNCATED,
    "OutputLengthExceededError": Outcome.TRUNCATED,
    "AgentSafetyRefusalError": Outcome.COMPLETED,
    "ContentPolicyViolationError": Outcome.COMPLETED,
}
"""The Harbor exceptions that the agent causes: its reward counts."""
_LONGEST_NUMBER = 1000
"""The maximum size in bytes of a file that contains one number."""
_OF_MODEL = re.compile(r"(?i)api|ratelimit|authentication|modelnotfound|badrequest|serviceunavailable|internalserver")
_VERSION = re.compile(rb'"schema_version"\s*:\s*"ATIF-v\d')


class Atif(Program):
    name = "atif"

    def files(self, path: Path) -> list[Path]:
        if path.suffix == ".json":
            return [path] if _is_trajectory(path) else []
        if found := _of_trial(path):
            return found
        names = files_in(path)
        flat = [path / name for name in names if name.endswith(".json") and _is_trajectory(path / name)]
        found = flat or [file for name in names if (path / name).is_dir() for file in _of_trial(path / name)]
        return sorted(found, key=lambda file: (self.stamp(file)[1], file))

    def stamp(self, file: Path) -> Stamp:
        """The stamp of the file and of its trial's result, which is written later."""
        states = [each.stat() for each in {file, _trial_of(file) / _RESULT} if each.exists()]
        return sum(each.st_size for each in states), max(each.st_mtime_ns for each in states)

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        if after:
            return
        result = _read(_trial_of(file) / _RESULT)
        trajectory = {} if file.name == _RESULT else _read(file)
        if file.name != _RESULT and not trajectory:
            raise ValueError("no trajectory")
        yield ForeignRollout(_trace(file, trajectory, result), 1)

    def describe(self, files: list[Path]) -> dict[str, Any]:
        agent = (_read(files[0]).get("agent") or {}) if files[0].name != _RESULT else {}
        source = _read(_trial_of(files[0]) / _RESULT).get("source")
        found = {"taskset": source, "model": agent.get("model_name"), "agent": agent.get("name")}
        return {name: value for name, value in found.items() if value}


def _of_trial(folder: Path) -> list[Path]:
    """The trajectory of a trial, or those of its steps; without one, its result."""
    found = [folder / "agent" / _TRAJECTORY]
    found += sorted(folder.glob(f"steps/*/agent/{_TRAJECTORY}"))
    found = [file for file in found if file.is_file()]
    return found or ([folder / _RESULT] if _TRIAL.are_in(folder / _RESULT) else [])


def _trial_of(file: Path) -> Path:
    """The folder of the trial that a trajectory belongs to."""
    if file.parent.name != "agent":
        return file.parent
    place = file.parent.parent
    return place.parent.parent if place.parent.name == "steps" else place


def _is_trajectory(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return bool(_VERSION.search(file.read(4096)))
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        found = decode(read_regular(path, most=_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _trace(file: Path, trajectory: dict[str, Any], result: dict[str, Any]) -> Trace:
    steps = _steps(file, trajectory)
    agent = trajectory.get("agent") or {}
    begins = next((at for at, step in enumerate(steps) if _is_turn(step)), len(steps))
    prompt = [message for step in steps[:begins] for message in _messages(step)]
    said = [message for step in steps[begins:] for message in _messages(step)]
    stage = file.parent.parent.name if file.parent.parent.parent.name == "steps" else ""
    name = str(result.get("task_name") or "")
    task = Task(
        prompt=prompt,
        data_source=str(result.get("source") or agent.get("name") or ""),
        extra_info={"task_name": f"{name}/{stage}" if stage else name} if name else {},
    )
    uid = digest([name, result.get("task_checksum"), stage]) if name else ""
    trace = Trace(task=task, uid=uid, model=str(agent.get("model_name") or ""))
    trace.turns, trace.final = turns_of(prompt, said)
    metrics = [step.get("metrics") or {} for step in filter(_is_turn, steps)]
    trace.tokens = tokens_of(tuple(each.get(name) for name in _TOKENS) for each in metrics)
    _note_usage(trace, trajectory, steps, result)
    _note_result(trace, _result_of(result, stage), file)
    if trajectory.get("subagent_trajectories"):
        trace.warnings.append(f"{len(trajectory['subagent_trajectories'])} agents that it called are not shown")
    return trace


def _steps(file: Path, trajectory: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a trajectory and of the files that continue it, without the steps that these repeat."""
    steps, seen = list(trajectory.get("steps") or []), {file.name}
    while (following := trajectory.get("continued_trajectory_ref")) and following not in seen:
        seen.add(following)
        trajectory = _read(file.parent / Path(str(following)).name)
        steps += [step for step in trajectory.get("steps") or [] if not step.get("is_copied_context")]
    return steps


def _is_turn(step: dict[str, Any]) -> bool:
    return step.get("source") == "agent" and not step.get("is_copied_context")


def _messages(step: dict[str, Any]) -> Iterator[Message]:
    content = _content(step.get("message"))
    calls = step.get("tool_calls") or []
    if step.get("source") == "agent":
        message: Message = {"role": "assistant", "content": content}
        if step.get("reasoning_content"):
            message["reasoning_content"] = step["reasoning_content"]
        if calls:
            message["tool_calls"] = [
                write_call(call["tool_call_id"], call["function_name"], call.get("arguments")) for call in calls
            ]
        yield message
    else:
        yield {"role": step.get("source") or "user", "content": content}
    known = {call["tool_call_id"] for call in calls}
    for found in (step.get("observation") or {}).get("results") or []:
        if found.get("source_call_id") in known:
            yield {"role": "tool", "tool_call_id": found["source_call_id"], "content": _content(found.get("content"))}
        else:
            yield {"role": "user", "content": _content(found.get("content"))}


def _content(content: Any) -> Any:
    """An image is only named, because its file may be anywhere."""
    if not isinstance(content, list):
        return content or ""
    texts = [
        str(part.get("text") or "") if part.get("type") == "text" else f"[{part.get('type')} {_path_of(part)}]"
        for part in content
    ]
    return "\n".join(texts)


def _path_of(part: dict[str, Any]) -> str:
    return str((part.get("source") or {}).get("path") or "")


def _note_usage(trace: Trace, trajectory: dict[str, Any], steps: list[dict[str, Any]], result: dict[str, Any]) -> None:
    total, of_agent = trajectory.get("final_metrics") or {}, result.get("agent_result") or {}

    def count(name: str, of_result: str) -> int:
        counts = [(step.get("metrics") or {}).get(name) or 0 for step in filter(_is_turn, steps)]
        return total.get(f"total_{name}") or of_agent.get(of_result) or sum(counts)

    trace.usage = Usage(count("prompt_tokens", "n_input_tokens"), count("completion_tokens", "n_output_tokens"))
    cost = number_of(total.get("total_cost_usd")) or number_of(of_agent.get("cost_usd"))
    if cost is not None:
        trace.metrics["cost_usd"] = cost
    trace.timing = Timing(
        policy=_seconds(result.get("agent_execution")),
        environment=_seconds(result.get("verifier")),
        total=_seconds(result) or _seconds({"started_at": _time(steps[:1]), "finished_at": _time(steps[-1:])}),
        began=time_of(result.get("started_at") or _time(steps[:1])),
    )


def _time(steps: list[dict[str, Any]]) -> Any:
    return steps[0].get("timestamp") if steps else None


# The result of a Harbor trial: its rewards, its exception, its duration.


def _seconds(phase: Any) -> float:
    """The duration of a phase or of a whole trial in seconds; 0 if unknown."""
    times = [time_of(phase.get(name)) for name in ("started_at", "finished_at")] if isinstance(phase, dict) else [None]
    return max(0.0, times[1] - times[0]) if times[0] is not None and times[1] is not None else 0.0


def _result_of(result: dict[str, Any], stage: str) -> dict[str, Any]:
    """The result of a trial, or of one of its steps."""
    if not stage:
        return result
    return next((each for each in result.get("step_results") or [] if each.get("step_name") == stage), {})


def _note_result(trace: Trace, result: dict[str, Any], file: Path) -> None:
    found = numbers_in((result.get("verifier_result") or {}).get("rewards") or {})
    if not found and (reward := _reward_file(file)) is not None:
        found = {"reward": reward}
    trace.metrics |= {name: value for name, value in found.items() if name != "reward"}
    if "reward" in found or len(found) == 1:
        trace.reward = found.get("reward", next(iter(found.values())))
    elif found:
        trace.reward = sum(found.values()) / len(found)
        trace.warnings.append(f"the reward is the mean of {', '.join(found)}")
    trace.turns[-1].reward = trace.reward or 0.0
    if error := result.get("exception_info"):
        _note_exception(trace, error)


def _note_exception(trace: Trace, error: dict[str, Any]) -> None:
    kind, message = (str(error.get(f"exception_{name}") or "") for name in ("type", "message"))
    if kind in _MEASURED and trace.reward is not None:
        trace.outcome = _MEASURED[kind]
        trace.warnings.append(f"{kind}: {message}")
        return
    by_model = bool(_OF_MODEL.search(kind))
    outcome = Outcome.POLICY_ERROR if by_model else Outcome.ENVIRONMENT_ERROR
    phase = "policy" if by_model else "environment"
    failure = Failure(kind or "Exception", message, phase, str(error.get("exception_traceback") or ""))
    trace.fail(Outcome.CANCELLED if kind == "CancelledError" else outcome, failure)


def _reward_file(file: Path) -> float | None:
    """The reward that the verifier of a trial wrote, if there is no result yet."""
    try:
        return number_of(float(read_regular(file.parent.parent / "verifier" / "reward.txt", most=_LONGEST_NUMBER)))
    except (OSError, ValueError):
        return None
