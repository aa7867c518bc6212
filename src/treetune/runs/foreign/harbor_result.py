"""What a trial of Harbor came to: its rewards, its exception, how long it took.

    note_result(trace, result_of(result, stage=""), file)      # the JSON of `result.json`

An agent that ran out of time or of tokens was measured, and so was one that refused; any other exception is a failure.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from treetune.core.trace import Failure, Outcome, Trace
from treetune.runs.foreign.kind import number_of, numbers_in, time_of
from treetune.runs.plain_files import read_regular

_MEASURED = {
    "AgentTimeoutError": Outcome.TIMEOUT,
    "ContextWindowExceededError": Outcome.TRUNCATED,
    "ContextLengthExceededError": Outcome.TRUNCATED,
    "OutputTokenExceededError": Outcome.TRUNCATED,
    "OutputLengthExceededError": Outcome.TRUNCATED,
    "AgentSafetyRefusalError": Outcome.COMPLETED,
    "ContentPolicyViolationError": Outcome.COMPLETED,
}
"""The exceptions of Harbor that are the agent's doing: its reward counts."""
_LONGEST_NUMBER = 1000
"""Bytes of a file that holds one."""
_OF_MODEL = re.compile(r"(?i)api|ratelimit|authentication|modelnotfound|badrequest|serviceunavailable|internalserver")


def seconds(told: Any) -> float:
    """Of a phase, or of a whole trial; 0 where it is not told."""
    times = [time_of(told.get(name)) for name in ("started_at", "finished_at")] if isinstance(told, dict) else [None]
    return max(0.0, times[1] - times[0]) if times[0] is not None and times[1] is not None else 0.0


def result_of(result: dict[str, Any], stage: str) -> dict[str, Any]:
    """That of a trial, or of one of its steps."""
    if not stage:
        return result
    return next((each for each in result.get("step_results") or [] if each.get("step_name") == stage), {})


def note_result(trace: Trace, result: dict[str, Any], file: Path) -> None:
    found = numbers_in((result.get("verifier_result") or {}).get("rewards") or {})
    if not found and (told := _reward_file(file)) is not None:
        found = {"reward": told}
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
    """What the verifier of a trial wrote, where there is no result yet."""
    try:
        return number_of(float(read_regular(file.parent.parent / "verifier" / "reward.txt", most=_LONGEST_NUMBER)))
    except (OSError, ValueError):
        return None
