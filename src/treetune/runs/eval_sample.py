"""A `Sample` of an Inspect log: a rollout with its messages, its calls of the model and of tools, and its scores."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.images import url_of
from treetune.chat.message import Message, reasoning_of, text_of
from treetune.core.trace import AgentRecord, Outcome, Trace, Turn
from treetune.runs.foreign.inspect import REWARD, SUCCESS
from treetune.runs.foreign.program import calls_of

_ROLES = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool"}
_STOPS = {"length": "max_tokens", "stop": "stop", "tool_calls": "tool_calls", "content_filter": "content_filter"}

Plain = dict[str, Any]


class Sample:
    """Converts a trace to a sample. Data for which Inspect has no field (source, step, rewards and `info` of turns,
    verdicts of judges) is in the metadata. Images are stored once, as attachments."""

    def __init__(self, trace: Trace, id: int | str, epoch: int, began: float) -> None:
        self.trace, self.id, self.epoch, self.began = trace, id, epoch, began
        self.uuid = hashlib.blake2b(f"{trace.uid} {trace.occurrence} {epoch}".encode(), digest_size=11).hexdigest()
        self.model = trace.model or "none/none"
        self.attachments: dict[str, str] = {}
        self.messages: list[Plain] = []
        """The messages of all conversations; those of the current one are at `places`."""
        self.places: list[int] = []
        self.events: list[Plain] = []
        self.seconds = 0.0
        """When the next event begins, in seconds from the beginning of the sample."""

    def plain(self) -> Plain:
        trace, target, prompt = self.trace, _target(self.trace.task.ground_truth), self.trace.task.prompt
        asked = prompt if isinstance(prompt, str) else [self._message(each, "input") for each in prompt or []]
        self._event("sample_init", sample={"id": self.id, "input": asked, "target": target}, state={})
        if trace.agent is not None and trace.agent.calls:
            self._add_calls(trace.agent)
        else:
            for turn in trace.turns:
                self._add_turn(turn)
            self._add_messages(trace.final)
        turns = trace.agent.calls if trace.agent is not None else trace.turns
        scores = _scores(trace)
        for name, score in scores.items():
            self._event("score", score=score, target=target, scorer=name)
        usage = {self.model: usage_of(trace.usage.prompt_tokens, trace.usage.completion_tokens)}
        made = {
            "id": self.id,
            "epoch": self.epoch,
            "input": asked,
            "target": target,
            "messages": [self.messages[at] for at in self.places],
            "output": self._last_output(),
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
            "turn_count": len(turns),
            **self._end(),
        }
        pool = {"messages": self.messages, "calls": []}
        return {**made, "events": self.events, "events_data": pool, "attachments": self.attachments}

    def _add_calls(self, agent: AgentRecord) -> None:
        """Adds the calls of an agent, each after those of its conversation. The messages of the sample are those of the
        main one."""
        before = {call: last for line in agent.lineage for last, call in pairwise([None, *line.calls])}
        places: dict[int | None, list[int]] = {}
        for at, call in enumerate(agent.calls):
            self.places = [*places.get(before.get(at), [])]
            self._add_turn(call)
            places[at] = self.places
        self.places = places[agent.main_calls[-1]] if agent.main_calls else []

    def _add_messages(self, messages: Iterable[Message], source: str | None = None) -> None:
        for message in messages:
            self.places.append(len(self.messages))
            self.messages.append(self._message(message, source))

    def _add_turn(self, turn: Turn) -> None:
        self._add_messages(turn.observed, None if self.places else "input")
        if turn.message is None:
            return
        if self.places and self.messages[self.places[-1]]["role"] == "assistant":
            self.places.pop()  # the beginning of the answer, which the answer repeats
        answer = self._message(turn.message, "generate")
        self._event(
            "model",
            seconds=turn.policy_seconds,
            model=self.model,
            input=[],
            input_refs=_ranges(self.places),
            tools=[_tool(tool) for tool in self.trace.tools],
            tool_choice="auto",
            config={},
            output=self._output(answer, turn),
        )
        self.places.append(len(self.messages))
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
        made: Plain = {"uuid": f"{self.uuid}-{len(self.events)}", "timestamp": iso_time(self.began + self.seconds)}
        made["working_start"] = self.seconds
        if seconds is not None:
            self.seconds += seconds
            made |= {"completed": iso_time(self.began + self.seconds), "working_time": seconds}
        self.events.append({**made, "event": kind, **values})

    def _output(self, message: Plain, turn: Turn) -> Plain:
        stop = _STOPS.get(turn.finish_reason or "", "tool_calls" if turn.calls else "unknown")
        return {
            "model": self.model,
            "choices": [{"message": message, "stop_reason": stop}],
            "completion": text_of(turn.message.get("content")) or "" if turn.message else "",
        }

    def _last_output(self) -> Plain:
        if self.trace.agent is not None and self.trace.turns and (said := self.trace.turns[-1].message) is not None:
            return self._output(self._message(said, "generate"), self.trace.turns[-1])
        outputs = (event["output"] for event in reversed(self.events) if event["event"] == "model")
        return next(outputs, {"model": self.model, "choices": [], "completion": ""})

    def _end(self) -> Plain:
        """The limit or the error that ended the sample."""
        trace, failure = self.trace, self.trace.failure
        cut = bool(trace.turns) and trace.turns[-1].finish_reason == "length"
        if trace.outcome is Outcome.TIMEOUT:
            return self._limit("time", trace.timing.total, failure.message if failure else "the time limit was reached")
        if trace.outcome is Outcome.TRUNCATED and cut:
            return self._limit("token", float(trace.usage.completion_tokens), "an answer was cut off")
        if trace.outcome is Outcome.TRUNCATED:
            return self._limit("turn", float(len(trace.turns)), "a limit ended the episode")
        if failure is None and trace.outcome is Outcome.COMPLETED:
            return {}
        message = f"{failure.type}: {failure.message}" if failure else trace.outcome.value
        traceback = failure.traceback if failure else ""
        error = {"message": message, "traceback": traceback, "traceback_ansi": traceback}
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
            failed = (call for turn in self.trace.turns for call in turn.calls if call.error)
            made |= next((_error(call) for call in failed if call.id == made["tool_call_id"]), {})
        return made

    def _content(self, content: Any) -> Any:
        return [self._part(part) for part in content] if isinstance(content, list) else _text(content)

    def _part(self, part: Any) -> Plain:
        if isinstance(part, dict) and part.get("type") == "text":
            return {"type": "text", "text": str(part.get("text") or "")}
        if (url := url_of(part)) is None:
            return {"type": "text", "text": _text(part)}
        if url.startswith("data:"):
            name = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
            self.attachments[name], url = url, f"attachment://{name}"
        return {"type": "image", "image": url}


def _ranges(places: list[int]) -> list[list[int]]:
    """Places as ranges: `[0, 1, 2, 5]` is `[[0, 3], [5, 6]]`."""
    ranges: list[list[int]] = []
    for at in places:
        if ranges and ranges[-1][1] == at:
            ranges[-1][1] = at + 1
        else:
            ranges.append([at, at + 1])
    return ranges


def _scores(trace: Trace) -> dict[str, Plain]:
    """The reward and the metrics if there is a reward; a failure has neither."""
    if trace.reward is None:
        return {}
    scores: dict[str, Plain] = {REWARD: {"value": trace.reward}}
    scores[REWARD] |= {"answer": trace.answer} if trace.answer is not None else {}
    scores[REWARD] |= {"explanation": trace.explanation} if trace.explanation is not None else {}
    if trace.success is not None:
        scores[SUCCESS] = {"value": trace.success}
    for name, value in trace.metrics.items():
        if name not in scores and value is not None and math.isfinite(value):
            scores[name] = {"value": value}
    return scores


def _metadata(trace: Trace) -> Plain:
    turns = [{"reward": turn.reward, "info": turn.info} for turn in trace.turns]
    fields = {
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
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def usage_of(read: int, sampled: int) -> Plain:
    return {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}


def _tool(tool: Mapping[str, Any]) -> Plain:
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    named = {name: str(function.get(name) or "") for name in ("name", "description")}
    fields = {"properties": parameters.get("properties") or {}, "required": parameters.get("required") or []}
    return {**named, "parameters": {"type": "object", **fields}}


def _tool_call(call: ToolCall) -> Plain:
    made = {"id": call.id, "function": call.name, "arguments": _arguments(call.arguments), "type": "function"}
    wrong = not isinstance(call.arguments, dict) and call.arguments is not None
    return {**made, "parse_error": f"not a JSON object: {call.arguments}"} if wrong else made


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
