"""A trace as a sample of Inspect: its messages, scores, events, usage, errors and limits.

    sample_of(trace, id=17, epoch=1)            # plain values, as a `.eval` log has them

What Inspect has no place for (source, step, rewards and `info` of turns, verdicts of judges) is in the metadata. Images
are kept once, as attachments.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.images import url_of
from treetune.chat.message import Message, reasoning_of, text_of
from treetune.core.trace import Outcome, Trace, Turn
from treetune.runs.foreign.inspect import REWARD, SUCCESS
from treetune.runs.foreign.kind import calls_of

_ROLES = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool"}
_STOPS = {"length": "max_tokens", "stop": "stop", "tool_calls": "tool_calls", "content_filter": "content_filter"}
_TEXT = 1000
"""How much of a text a summary has."""

Plain = dict[str, Any]


def sample_of(trace: Trace, id: int | str, epoch: int, began: float) -> Plain:
    """`began` is when it began, as far as that is known, in seconds since 1970."""
    made = _Sample(trace, id, epoch, trace.timing.began or began)
    return made.plain()


def summary_of(sample: Plain) -> Plain:
    """What the list of samples shows."""
    names = ("id", "epoch", "target", "scores", "model_usage", "role_usage", "started_at", "completed_at")
    more = ("total_time", "working_time", "uuid", "turn_count")
    short = {name: sample[name] for name in (*names, *more)}
    asked = sample["input"]
    if not isinstance(asked, str):
        asked = "\n\n".join(_words(message["content"]) for message in asked)
    thin = {name: value for name, value in sample["metadata"].items() if isinstance(value, str | int | float | bool)}
    told = {"error": (sample.get("error") or {}).get("message"), "limit": (sample.get("limit") or {}).get("type")}
    scores = {name: {**score, "explanation": _cut(score.get("explanation"))} for name, score in short["scores"].items()}
    return {
        **short,
        "input": _cut(asked),
        "metadata": {name: _cut(value) for name, value in thin.items()},
        "scores": scores,
        **{name: value for name, value in told.items() if value is not None},
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"({part['type'].capitalize()})" for part in content)


def _cut(text: Any) -> Any:
    return text[:_TEXT] if isinstance(text, str) else text


class _Sample:
    def __init__(self, trace: Trace, id: int | str, epoch: int, began: float) -> None:
        self.trace, self.id, self.epoch, self.began = trace, id, epoch, began
        self.uuid = hashlib.blake2b(f"{trace.uid} {trace.occurrence} {epoch}".encode(), digest_size=11).hexdigest()
        self.model = trace.model or "none/none"
        self.attachments: dict[str, str] = {}
        self.messages: list[Plain] = []
        self.events: list[Plain] = []
        self.seconds = 0.0
        """Since it began, of the event that comes next."""

    def plain(self) -> Plain:
        trace = self.trace
        target = trace.task.ground_truth
        prompt = trace.task.prompt
        asked = prompt if isinstance(prompt, str) else [self._message(each, "input") for each in prompt or []]
        self._event("sample_init", sample={"id": self.id, "input": asked, "target": _target(target)}, state={})
        for turn in trace.turns:
            self._add_turn(turn)
        self.messages += [self._message(message) for message in trace.final]
        scores = _scores(trace)
        for name, score in scores.items():
            self._event("score", score=score, target=_target(target), scorer=name)
        output = self._last_output()
        usage = {self.model: _usage(trace.usage.prompt_tokens, trace.usage.completion_tokens)}
        made = {
            "id": self.id,
            "epoch": self.epoch,
            "input": asked,
            "target": _target(target),
            "messages": self.messages,
            "output": output,
            "scores": scores,
            "metadata": _metadata(trace),
            "store": {},
            "model_usage": usage if trace.usage.prompt_tokens or trace.usage.completion_tokens else {},
            "role_usage": {},
            "started_at": iso_time(self.began),
            "completed_at": iso_time(self.began + trace.timing.total),
            "total_time": trace.timing.total,
            "working_time": max(0.0, trace.timing.total - trace.timing.paused),
            "uuid": self.uuid,
            "turn_count": len(trace.turns),
            **self._end(),
        }
        pool = {"messages": self.messages, "calls": []}
        return {**made, "events": self.events, "events_data": pool, "attachments": self.attachments}

    def _add_turn(self, turn: Turn) -> None:
        first = not self.messages
        self.messages += [self._message(message, "input" if first else None) for message in turn.observed]
        if turn.message is None:
            return
        answer = self._message(turn.message, "generate")
        shown = len(self.messages)
        if self.messages and self.messages[-1]["role"] == "assistant":
            shown -= 1  # the beginning of the answer, which the answer holds
            self.messages.pop()
        self._event(
            "model",
            seconds=turn.policy_seconds,
            model=self.model,
            input=[],
            input_refs=[[0, shown]],
            tools=[_tool(tool) for tool in self.trace.tools],
            tool_choice="auto",
            config={},
            output=self._output(answer, turn),
        )
        self.messages.append(answer)
        for call in turn.calls:
            self._event(
                "tool",
                seconds=call.seconds,
                type="function",
                id=call.id,
                function=call.name,
                arguments=_arguments(call.arguments),
                result=self._content(call.result),
                **_error(call),
                events=[],
            )

    def _event(self, kind: str, seconds: float | None = None, **values: Any) -> None:
        begins = self.seconds
        told: Plain = {"uuid": f"{self.uuid}-{len(self.events)}", "timestamp": iso_time(self.began + begins)}
        if seconds is not None:
            self.seconds += seconds
            told |= {"completed": iso_time(self.began + self.seconds), "working_time": seconds}
        self.events.append({**told, "working_start": begins, "event": kind, **values})

    def _output(self, message: Plain, turn: Turn) -> Plain:
        stop = _STOPS.get(turn.finish_reason or "", "tool_calls" if turn.calls else "unknown")
        return {
            "model": self.model,
            "choices": [{"message": message, "stop_reason": stop}],
            "completion": text_of(turn.message.get("content")) or "" if turn.message else "",
        }

    def _last_output(self) -> Plain:
        said = [event["output"] for event in self.events if event["event"] == "model"]
        return said[-1] if said else {"model": self.model, "choices": [], "completion": ""}

    def _end(self) -> Plain:
        """The limit or the error that ended it."""
        trace, failure = self.trace, self.trace.failure
        cut = bool(trace.turns) and trace.turns[-1].finish_reason == "length"
        if trace.outcome is Outcome.TIMEOUT:
            return self._limit("time", trace.timing.total, failure.message if failure else "the time was over")
        if trace.outcome is Outcome.TRUNCATED and cut:
            return self._limit("token", float(trace.usage.completion_tokens), "an answer was cut off")
        if trace.outcome is Outcome.TRUNCATED:
            return self._limit("turn", float(len(trace.turns)), "a limit ended the episode")
        if failure is None and trace.outcome is Outcome.COMPLETED:
            return {}
        message = f"{failure.type}: {failure.message}" if failure else trace.outcome.value
        told = {"message": message, "traceback": failure.traceback if failure else ""}
        error = {**told, "traceback_ansi": told["traceback"]}
        self._event("error", error=error)
        return {"error": error}

    def _limit(self, kind: str, limit: float, reason: str) -> Plain:
        self._event("sample_limit", type=kind, message=reason, limit=limit)
        return {"limit": {"type": kind, "limit": limit, "reason": reason}}

    # Messages

    def _message(self, message: Message, source: str | None = None) -> Plain:
        role = _ROLES.get(str(message.get("role")), "user")
        content = self._content(message.get("content"))
        if thought := reasoning_of(message):
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            content = [{"type": "reasoning", "reasoning": thought}, *parts]
        made: Plain = {"id": f"{self.uuid}-m{len(self.messages)}", "role": role, "content": content}
        if source is not None:
            made["source"] = source
        if role == "assistant":
            made["model"] = self.model
            if calls := calls_of(message):
                made["tool_calls"] = [_tool_call(call) for call in calls]
        if role == "tool":
            made |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
            made |= self._error_of(message.get("tool_call_id"))
        return made

    def _error_of(self, id: Any) -> Plain:
        """What went wrong with the call that a message is the result of."""
        calls = (call for turn in self.trace.turns for call in turn.calls if call.id == id and call.error)
        call = next(calls, None)
        return {} if call is None else _error(call)

    def _content(self, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            return _text(content)
        return [self._part(part) for part in content]

    def _part(self, part: Any) -> Plain:
        if isinstance(part, dict) and part.get("type") == "text":
            return {"type": "text", "text": str(part.get("text") or "")}
        if (url := url_of(part)) is not None:
            if url.startswith("data:"):
                name = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
                self.attachments[name] = url
                url = f"attachment://{name}"
            return {"type": "image", "image": url}
        return {"type": "text", "text": _text(part)}


def _scores(trace: Trace) -> dict[str, Plain]:
    """The reward and the metrics, where there is a reward: a failure has none."""
    if trace.reward is None:
        return {}
    told = {"answer": trace.answer, "explanation": trace.explanation}
    first = {name: value for name, value in told.items() if value is not None}
    scores: dict[str, Plain] = {REWARD: {"value": trace.reward, **first}}
    if trace.success is not None:
        scores[SUCCESS] = {"value": trace.success}
    for name, value in trace.metrics.items():
        if name not in scores and value is not None and math.isfinite(value):
            scores[name] = {"value": value}
    return scores


def _metadata(trace: Trace) -> Plain:
    turns = [{"reward": turn.reward, "info": turn.info} for turn in trace.turns]
    told = {
        "uid": trace.uid,
        "source": trace.task.data_source,
        "outcome": trace.outcome.value,
        "occurrence": trace.occurrence,
        "rollout": trace.rollout,
        "step": trace.step,
        "version": trace.version,
        "retries": trace.retries,
        "environment": trace.task.env_class,
        "warnings": trace.warnings,
        "turns": turns if len(turns) > 1 or any(turn["info"] for turn in turns) else [],
        "judgements": msgspec.to_builtins(trace.judgements, enc_hook=repr),
        "extra_info": trace.task.extra_info,
    }
    return {name: value for name, value in told.items() if value not in (None, "", [], {})}


def _usage(read: int, sampled: int) -> Plain:
    return {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}


def _tool(tool: Mapping[str, Any]) -> Plain:
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    known = {"type": "object", "properties": parameters.get("properties") or {}}
    described = {"name": str(function.get("name") or ""), "description": str(function.get("description") or "")}
    return {**described, "parameters": {**known, "required": parameters.get("required") or []}}


def _tool_call(call: ToolCall) -> Plain:
    made = {"id": call.id, "function": call.name, "arguments": _arguments(call.arguments), "type": "function"}
    wrong = not isinstance(call.arguments, dict) and call.arguments is not None
    return {**made, "parse_error": f"no JSON object: {call.arguments}"} if wrong else made


def _arguments(arguments: Any) -> Plain:
    return arguments if isinstance(arguments, dict) else {}


def _error(call: ToolCall) -> Plain:
    return {"error": {"type": "unknown", "message": call.error}} if call.error else {}


def _target(truth: Any) -> str | list[str]:
    return [_text(item) for item in truth] if isinstance(truth, list) else _text(truth)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value, enc_hook=repr).decode()


def iso_time(seconds: float) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()
