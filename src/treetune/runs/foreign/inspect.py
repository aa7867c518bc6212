"""Inspect logs: `.eval`, a zip file with a member per sample, and `.json`.

An epoch of a sample is a rollout of a task. Its reward is the score that the log declares as its headline, or else the
first score: C is 1, P is 0.5, I and N are 0. The metrics hold the result of each scorer, by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from treetune.chat.calls import write_call
from treetune.chat.images import image_part
from treetune.chat.message import Message
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Timing, Trace
from treetune.runs.foreign.program import ForeignRollout, Program, Stamp, decode, number_of, time_of, turns_of
from treetune.runs.plain_files import open_regular

_ZSTANDARD = 93
"""The compression that Inspect writes; `zipfile` supports it from Python 3.14 on."""
_SAMPLES = "samples/"
_MOST_UNPACKED, _MOST_RATIO, _PIECE = 64 << 20, 100, 1 << 20
"""The maximum size in bytes of an unpacked member, its largest compression ratio, and the size of the pieces it is
unpacked in."""

REWARD, SUCCESS = "reward", "success"
"""The names of the scores in logs that we write."""
_GRADES = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_TIMES = ("time", "working")
"""The limits that are deadlines."""
_LONG = ("max_tokens", "model_length")


class Inspect(Program):
    name = "inspect"

    def files(self, path: Path) -> list[Path]:
        if path.suffix == ".eval":
            return [path] if _is_zip(path) else []
        return [path] if path.suffix == ".json" and _is_log(path) else []

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        if file.suffix == ".json":
            log = _with_places(_read_json(file))
            for at, sample in enumerate((log.get("samples") or [])[after:], after):
                yield _found(sample, log, at + 1, f"{file.name}, sample {at}")
            return
        with _open_zip(file) as members:
            log = _with_places(_read_header(members))
            samples = _samples(members)
            for at, member in enumerate(samples[after:], after):
                where = f"{file.name}, {member.filename}"
                try:
                    sample = decode(read_member(members, member))
                except (ValueError, OSError, zipfile.BadZipFile) as error:
                    yield ForeignRollout(None, at + 1, fault=f"{where}: {error}")
                    continue
                yield _found(sample, log, at + 1, where)

    def mark(self, file: Path, position: int) -> str:
        """A log grows by whole samples. A sample that was run again replaces the earlier one."""
        if file.suffix == ".json":
            return ""
        with _open_zip(file) as members:
            samples = _samples(members)[:position]
        return hashlib.sha256(repr([(each.filename, each.CRC) for each in samples]).encode()).hexdigest()[:16]

    def describe(self, files: list[Path]) -> dict[str, Any]:
        return dict(_describe(files[0], self.stamp(files[0])))


def read_member(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Reads the bytes of a member, including one compressed with zstandard. Whatever size the log claims, it is
    unpacked piece by piece; raises ValueError if it is too large."""
    assert members.fp is not None
    there = os.fstat(members.fp.fileno()).st_size
    most = _MOST_UNPACKED + _MOST_RATIO * min(member.compress_size, there)
    if member.compress_type != _ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
        with members.open(member) as opened:
            return _read_bounded(opened, most)
    import pyarrow as pa

    packed = pa.py_buffer(_packed_bytes(members, member))
    with pa.input_stream(packed, compression="zstd") as stream:
        return _read_bounded(stream, most)


def _read_bounded(file: Any, most: int) -> bytes:
    unpacked = bytearray()
    while part := file.read(_PIECE):
        unpacked += part
        if len(unpacked) > most:
            raise ValueError(f"it unpacks to more than {most >> 20} MB")
    return bytes(unpacked)


def _packed_bytes(members: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    file = members.fp
    assert file is not None
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{member.filename} does not begin at the position that the file states")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    file.seek(name + extra, 1)
    return file.read(member.compress_size)


def _samples(members: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The samples in the order of writing. If several have the same name, the last one counts."""
    return list({each.filename: each for each in members.infolist() if each.filename.startswith(_SAMPLES)}.values())


def _read_header(members: zipfile.ZipFile) -> dict[str, Any]:
    """The header of a log; only its first part while the log is being written."""
    names = set(members.namelist())
    for name in ("header.json", "_journal/start.json"):
        if name in names:
            header = decode(read_member(members, members.getinfo(name)))
            return header if isinstance(header, dict) else {}
    return {}


def _with_places(log: dict[str, Any]) -> dict[str, Any]:
    """A log with the position of each sample in the dataset, by sample id."""
    ids = ((log.get("eval") or {}).get("dataset") or {}).get("sample_ids") or []
    return {**log, "places": {id: at for at, id in enumerate(ids)}}


@contextmanager
def _open_zip(file: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(file) as opened, zipfile.ZipFile(opened) as members:
        yield members


def _is_zip(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def _read_json(file: Path) -> dict[str, Any]:
    with open_regular(file) as opened:
        log = decode(opened.read())
    return log if isinstance(log, dict) else {}


def _is_log(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            begins = file.read(1024)
    except OSError:
        return False
    return bool(re.match(rb'\s*\{\s*"version":\s*\d+\s*,\s*"status":', begins)) and b'"eval"' in begins


@lru_cache(maxsize=64)
def _describe(file: Path, stamp: Stamp) -> dict[str, Any]:
    try:
        if file.suffix == ".json":
            log = _read_json(file)
        else:
            with _open_zip(file) as members:
                log = _read_header(members)
    except (OSError, ValueError, zipfile.BadZipFile):
        return {}
    spec = log.get("eval") or {}
    config = spec.get("config") or {}
    found = {
        "taskset": {"id": spec.get("task"), **(spec.get("task_args") or {})},
        "model": spec.get("model"),
        "sampling": spec.get("model_generate_config"),
        "num_rollouts": config.get("epochs"),
        "limits": {name: config[name] for name in config if name.endswith("_limit")},
        "created": spec.get("created"),
        "status": log.get("status"),
    }
    return {name: value for name, value in found.items() if value not in (None, {}, "")}


def _found(sample: Any, log: Mapping[str, Any], position: int, where: str) -> ForeignRollout:
    try:
        trace = _trace_of(sample, log.get("eval") or {}, log["places"].get(sample["id"], -1))
        return ForeignRollout(trace, position, max(0, int(sample["epoch"]) - 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return ForeignRollout(None, position, fault=f"{where}: {type(error).__name__}: {error}")


# A sample as a trace


def _trace_of(sample: dict[str, Any], spec: Mapping[str, Any], idx: int = -1) -> Trace:
    """Converts a sample to a trace. `idx` is its position in the dataset; -1 if unknown."""
    kept = sample.get("attachments") or {}
    asked = sample["input"]
    prompt = asked if isinstance(asked, str) else [_message(message, kept) for message in asked]
    choices = {"choices": sample["choices"]} if sample.get("choices") else {}
    task = Task(
        idx=idx,
        prompt=prompt,
        data_source=str(spec.get("task") or ""),
        ground_truth=None if sample.get("target") in ("", []) else sample.get("target"),
        extra_info={**(sample.get("metadata") or {}), **choices, "inspect_id": sample["id"]},
    )
    trace = Trace(task=task, uid="", model=str(spec.get("model") or ""))
    _note_turns(trace, sample, kept)
    _note_scores(trace, sample.get("scores") or {}, (spec.get("headline_metric") or {}).get("scorer"))
    _note_costs(trace, sample)
    _note_end(trace, sample)
    if "treetune" in (spec.get("packages") or {}):
        _bring_back(trace, sample.get("metadata") or {})
    return trace


def _bring_back(trace: Trace, kept: Mapping[str, Any]) -> None:
    """Restores the fields that `runs/eval_log.py` stored where Inspect has room for them."""
    trace.uid, trace.step = str(kept.get("uid") or ""), kept.get("step")
    further = kept.get("extra_info") or {}
    trace.task = msgspec.structs.replace(trace.task, data_source=str(kept.get("source") or ""), extra_info=further)
    trace.metrics.pop(REWARD, None)
    success = trace.metrics.pop(SUCCESS, None)
    trace.success = None if success is None else bool(success)


def _note_turns(trace: Trace, sample: dict[str, Any], kept: Mapping[str, str]) -> None:
    messages = sample.get("messages") or []
    given = [at for at, message in enumerate(messages) if _is_answer(message)][:1] or [len(messages)]
    prompt, said = messages[: given[0]], messages[given[0] :]
    trace.turns, trace.final = turns_of(
        [_message(each, kept) for each in prompt], [_message(each, kept) for each in said]
    )
    failed = {each["tool_call_id"]: each["error"] for each in said if each.get("error") and each.get("tool_call_id")}
    seconds = {each.get("id"): each.get("working_time") for each in _events(sample, "tool")}
    for call in (call for turn in trace.turns for call in turn.calls):
        if call.id in failed:
            call.error = str(failed[call.id].get("message"))
        call.seconds = number_of(seconds.get(call.id)) or 0.0
    if stop := [choice.get("stop_reason") for choice in (sample.get("output") or {}).get("choices") or []]:
        trace.turns[-1].finish_reason = "length" if stop[0] in _LONG else stop[0]


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" and message.get("source") != "input"


def _events(sample: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in sample.get("events") or [] if event.get("event") == kind]


def _note_scores(trace: Trace, scores: Mapping[str, Any], headline: str | None) -> None:
    for name, score in scores.items():
        value = score.get("value")
        parts = {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        trace.metrics |= {key: number for key, part in parts.items() if (number := grade(part)) is not None}
    chosen = scores.get(headline or "") or next(iter(scores.values()), None)
    if chosen is not None:
        trace.reward = None if isinstance(chosen.get("value"), dict | list) else grade(chosen.get("value"))
        trace.answer, trace.explanation = chosen.get("answer"), chosen.get("explanation")
        if trace.reward is None:
            trace.warnings.append(f"the score is not a number: {chosen.get('reason') or chosen.get('value')}")
        else:
            trace.turns[-1].reward = trace.reward


def grade(value: Any) -> float | None:
    """The number to which Inspect converts a score; None if there is none."""
    if isinstance(value, str):
        try:
            value = _GRADES[value.lower()] if value.lower() in _GRADES else float(value)
        except ValueError:
            return None
    return number_of(value)


def _note_costs(trace: Trace, sample: Mapping[str, Any]) -> None:
    parts = ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")
    used = (sample.get("model_usage") or {}).values()
    trace.usage = Usage(
        sum(each.get(part) or 0 for each in used for part in parts),
        sum(each.get("output_tokens") or 0 for each in used),
    )

    def seconds(kind: str) -> float:
        return sum(number_of(event.get("working_time")) or 0.0 for event in _events(sample, kind))

    trace.timing = Timing(
        policy=seconds("model"),
        environment=seconds("tool"),
        total=number_of(sample.get("total_time")) or 0.0,
        began=time_of(sample.get("started_at")),
    )


def _note_end(trace: Trace, sample: Mapping[str, Any]) -> None:
    error, limit = sample.get("error"), sample.get("limit")
    if error and trace.reward is not None:  # `score_on_error`
        trace.warnings.append(f"it was scored, but had failed: {error.get('message')}")
    elif error:
        calls = _events(sample, "model")
        by_model = bool(calls) and bool(calls[-1].get("error"))
        outcome = Outcome.POLICY_ERROR if by_model else Outcome.ENVIRONMENT_ERROR
        message = str(error.get("message") or "")
        found = re.match(r"(\w+)\((.*)\)\Z", message, re.DOTALL)
        kind, said = (found[1], found[2].strip("'\"")) if found else ("Error", message)
        phase = "policy" if by_model else "environment"
        trace.fail(outcome, Failure(kind, said or message, phase, str(error.get("traceback") or "")))
    elif limit:
        trace.outcome = Outcome.TIMEOUT if limit.get("type") in _TIMES else Outcome.TRUNCATED
        trace.warnings.append(f"a limit of Inspect ended it: {limit.get('type')} {limit.get('limit')}")
    elif trace.turns[-1].finish_reason == "length":
        trace.outcome = Outcome.TRUNCATED
    if sample.get("invalidation"):
        trace.warnings.append("the sample was declared invalid")


# Messages


def _arguments(call: Mapping[str, Any]) -> str:
    given = call.get("arguments")
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _message(message: Mapping[str, Any], kept: Mapping[str, str]) -> Message:
    """Converts a message to the form of OpenAI's API. `kept` has the texts that the log stores separately, by name."""
    role, content = message.get("role"), _resolve(message.get("content"), kept)
    made: Message = {"role": role, "content": content}
    if isinstance(content, list):
        thoughts = [str(part.get("reasoning") or part.get("summary") or "") for part in content if _is_thought(part)]
        parts = [_part(part) for part in content if not _is_thought(part)]
        texts = [part["text"] for part in parts if part.get("type") == "text"]
        made["content"] = "\n".join(texts) if len(texts) == len(parts) else parts
        if thoughts:
            made["reasoning_content"] = "\n".join(thoughts)
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [write_call(str(each.get("id")), each["function"], _arguments(each)) for each in calls]
    if role == "tool":
        error = message.get("error") or {}
        named = {"tool_call_id": message.get("tool_call_id"), "name": message.get("function")}
        made |= {name: value for name, value in named.items() if value is not None}
        made["content"] = made["content"] or error.get("message") or ""
    return made


def _is_thought(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "reasoning"


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "text": str(part.get("text") or "")}
    return image_part(str(part["image"])) if part.get("type") == "image" and part.get("image") else part


def _resolve(value: Any, kept: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return kept.get(value.removeprefix("attachment://"), value) if value.startswith("attachment://") else value
    if isinstance(value, list):
        return [_resolve(item, kept) for item in value]
    return {key: _resolve(item, kept) for key, item in value.items()} if isinstance(value, dict) else value
