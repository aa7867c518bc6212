"""Rules for prompts: for each row's messages and images, and for all rows together, where no prompt should repeat or be
too long.

The headers of all images are read; if Pillow is installed, all images are decoded. Nothing is fetched.

A prompt is identified by a 64-bit key: the xxh3 of the concatenated contents, plus a sum that encodes where each
message ends. Rows and Arrow columns give the same keys, so a JSON file can be compared with a parquet file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from treetune.chat.images import check_image, is_remote, read_header, url_of
from treetune.core.finding import SHOWN
from treetune.data.arrow_values import encode_json
from treetune.data.rows.image_columns import IMAGES, count_marks, data_in, name_in
from treetune.data.rows.prompt_lengths import TEMPLATE_FAILS, PromptTokens, load_tokenizer
from treetune.data.sources.names import Row
from treetune.data.validate.rules import Fault, FilesReport, RowContext, show_value
from treetune.errors import UsageError

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]

ROLES = ("system", "user", "assistant")
RARE_ROLES = ("tool", "developer", "function")
"""Roles of chat formats that some chat templates do not know."""

# A row's messages


def check_prompt(row: Mapping[str, Any], check: RowContext) -> Iterator[Fault]:
    prompt = row.get("prompt")
    if prompt is None:
        yield "missing-prompt", "none"
    elif not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        yield "prompt-not-messages", show_value(prompt)
    elif not prompt:
        yield "empty-prompt", "an empty list"
    else:
        faults: dict[str, str] = {}
        for message in prompt:
            for rule, found in _check_message(message, check):
                faults.setdefault(rule, found)
        roles = [message.get("role") for message in prompt]
        if "user" not in roles and not faults.keys() & {"unknown-role", "missing-role"}:
            faults["no-user-message"] = f"only {', '.join(map(str, roles))}"
        if roles[-1] == "assistant":
            faults["ends-with-assistant"] = "the last message is the assistant's"
        yield from faults.items()


def _check_message(message: Mapping[str, Any], check: RowContext) -> Iterator[Fault]:
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield "missing-role", f"a message with only {', '.join(message) or 'nothing'}"
    elif role not in ROLES:
        yield ("rare-role" if role in RARE_ROLES else "unknown-role"), show_value(role)
    if not check.contents:
        return
    if content is None:
        if "tool_calls" not in message:
            yield "missing-content", f"no content in a message of the {message.get('role', '?')}"
        return
    if isinstance(content, str):
        text, blank = content, "" if content.strip() else show_value(content)
    elif isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        text, blank = "\n".join(str(part.get("text", "")) for part in content), "" if content else "an empty list"
    else:
        yield "content-not-text", show_value(content)
        return
    if blank:
        yield "empty-content", blank
    elif special := check.special.search(text):
        yield "special-tokens", special[0]


# A row's images


_OTHER_MARKS = re.compile("<video>|<audio>")


def check_images(row: Mapping[str, Any], check: RowContext) -> Iterator[Fault]:
    if not check.contents:
        return
    prompt, images = row.get("prompt"), row.get(IMAGES)
    messages = [one for one in prompt if isinstance(one, dict)] if isinstance(prompt, list) else []
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    faults: dict[str, str] = {}
    for item in [url for part in parts if (url := url_of(part)) is not None]:
        faults |= dict(_check_image(item))
    if isinstance(images, list):
        for item in images:
            faults |= dict(_check_image(item))
        if (found := _miscount(messages, images, check)) is not None:
            faults["image-count"] = found
    elif images is not None:
        faults["image-unreadable"] = f"not a list of images, {show_value(images)}"
    yield from faults.items()


def _miscount(messages: list[dict[str, Any]], images: list[Any], check: RowContext) -> str | None:
    if check.format.name == "skyrl":
        return f"{len(images)} in a column that SkyRL does not read" if images else None
    texts = [one["content"] for one in messages if isinstance(one.get("content"), str)]
    if images and check.format.name == "verl" and (found := _OTHER_MARKS.search(" ".join(texts))):
        return f"{found[0]} in the text, but no image for it"
    places = count_marks(messages)
    if check.format.name == "trl" and not places and len(texts) == len(messages):
        return None  # TRL puts images first
    return f"{len(images)} images, {places} places" if places != len(images) else None


def _check_image(item: Any) -> Iterator[Fault]:
    try:
        data = data_in(item)
        if data is None:
            name = name_in(item)
            if "://" in name and not is_remote(name):
                yield "image-unreadable", f"{name!r:.80}, which trainers do not fetch"
            else:
                yield "image-elsewhere", f"{name!r:.80}"
            return
        read_header(data)
    except (ValueError, TypeError, AttributeError) as error:
        yield "image-unreadable", str(error)
        return
    try:
        check_image(data)
    except ValueError as error:
        yield "image-size", str(error)
        return
    if (problem := _decode(data)) is not None:
        yield "image-unreadable", problem


def _decode(data: bytes) -> str | None:
    """Return what is wrong with an image as a whole; None if nothing is, or Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # damaged files can raise anything
        return f"it cannot be decoded: {error}"
    return None


# All prompts


ODD = 0x9E3779B97F4A7C15
_VALIDATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|test|eval|dev)(?:[^a-z]|$)")
_TRAINING = re.compile(r"(?:^|[^a-z])(?:train|training)(?:[^a-z]|$)")


def key_of(prompt: Any, images: Any = None) -> int:
    """Return the key of a prompt that is a list of messages, and of its images. Any other prompt has the key 0, which
    is never reported as a repeat."""
    from xxhash import xxh3_64_intdigest

    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        return 0
    contents = [_encode(message.get("content")) for message in prompt]
    contents += [] if not images else [msgspec.json.encode(images, enc_hook=repr)]
    ends = sum(len(content) * (place + 1) for place, content in enumerate(contents))
    return (xxh3_64_intdigest(b"".join(contents)) + ends * ODD) & ((1 << 64) - 1)


def _encode(content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode(errors="replace")
    return b"" if content is None else encode_json(content)


def is_validation(file: str) -> bool:
    """Whether a file's full name, or its folder's, marks it as validation data; `test/train.parquet` does not."""
    path = Path(file)
    if _TRAINING.search(path.stem.lower()):
        return False
    return bool(_VALIDATION.search(path.stem.lower()) or _VALIDATION.fullmatch(path.parent.name.lower()))


class PromptKeys(NamedTuple):
    """The keys of some rows of one file."""

    file: str
    unit: str
    numbers: Sequence[int]
    keys: Keys


def report_repeats(parts: Sequence[PromptKeys], validation: Sequence[str], report: FilesReport) -> None:
    """Report prompts that occur more than once: within training files, and in both training and validation files."""
    training = [part for part in parts if part.file not in validation]
    held_out = [part for part in parts if part.file in validation]
    for some in (training, held_out):
        keys = _join(some)
        order = np.argsort(keys, kind="stable")  # stable: the first of equal keys is the first in the files
        again = np.zeros(len(keys), np.bool_)
        again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
        _report("duplicate-prompts", some, again, "prompts that came before", report)
    if held_out:
        both = np.isin(_join(held_out), _join(training))
        _report("train-val-overlap", held_out, both, "prompts that are in the training files too", report)


def _join(parts: list[PromptKeys]) -> Keys:
    return np.concatenate([np.empty(0, np.uint64), *(part.keys for part in parts)])


def _report(rule: str, parts: list[PromptKeys], mask: Mask, found: str, report: FilesReport) -> None:
    first = 0
    for file, unit, numbers, keys in parts:
        places = np.flatnonzero((keys != 0) & mask[first : first + len(keys)])
        first += len(keys)
        if len(places):
            rows = [numbers[int(place)] for place in places[:SHOWN]]
            report.add(rule, file, found, rows, unit, count=len(places))


class LengthCheck:
    """Renders prompts with a tokenizer's chat template and counts their tokens, as trainers' loaders do.

    `tokenizer`: a tokenizer, or the folder or name of one.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        loaded = load_tokenizer(tokenizer)
        if getattr(loaded, "chat_template", None) is None:
            raise UsageError(
                f"{tokenizer if isinstance(tokenizer, str) else 'the tokenizer'} has no chat template",
                remedy="name the tokenizer of an instruction-tuned model: trainers render prompts with it",
            )
        self._tokens = PromptTokens(loaded)
        self._most = most
        # Includes tokens that only the chat template uses, such as one before each turn.
        added = getattr(loaded, "added_tokens_decoder", {}).values()
        special = {*loaded.all_special_tokens, *(token.content for token in added if token.special)} - {""}
        # The pattern must also work in Arrow's engine; without special tokens it matches nothing.
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"[^\s\S]")

    def check(self, rows: Sequence[Row], numbers: Sequence[int], file: str, unit: str, report: FilesReport) -> None:
        """Count the tokens of some rows' prompts. Prompts that are not messages break another rule."""
        prompts = [prompt if isinstance(prompt := row.get("prompt"), list) else None for row in rows]
        longer, faults = self._tokens.above(self._most, prompts)
        for position, fault in faults.items():
            if fault.startswith(TEMPLATE_FAILS):
                report.add("template-fails", file, fault.removeprefix(TEMPLATE_FAILS), [numbers[position]], unit)
        for position, count in longer.items():
            found = f"{count:,} tokens, the limit is {self._most:,}"
            report.add("prompt-too-long", file, found, [numbers[position]], unit)
