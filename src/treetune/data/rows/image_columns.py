"""Images in trainers' rows: a column that holds them, and marks in the prompt for the place of each.

    messages, urls = to_marks(task.messages)      # verl: [{"role": "user", "content": "<image>What is it?"}]
    messages, urls = to_empty_parts(messages)     # TRL: [..., {"type": "image"}, {"type": "text", "text": ...}]
    join_images(messages, urls)                   # the same task's messages again

In JSON the column holds URLs, in parquet bytes (as the `datasets` library stores images, so that trainers' loaders
return them as pictures). Local files named in rows are read only if the rows are trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treetune.chat.images import check_image, decode_url, image_part, to_url, url_of, urls_in
from treetune.chat.message import Message
from treetune.config.trust import TRUST, trusts
from treetune.errors import TasksetError

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = "images"
PLACE = "<image>"
_MARKS = re.compile(r"<image>|<video>|<audio>")
"""The marks that verl searches for in the text of a row with images."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
"""Extensions of image files. Other files are never opened as images."""

HUGGINGFACE = {"huggingface": '{"info":{"features":{"images":{"feature":{"_type":"Image"},"_type":"Sequence"}}}}'}
"""The metadata that tells the `datasets` library that the column holds images."""


# To rows


def to_marks(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return messages as text with `<image>` marks, and the images."""
    written = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = list(map(_as_mark, parts))
        for part, text in zip(parts, texts, strict=True):
            if url_of(part) is None and (found := _MARKS.search(text)):
                raise TasksetError(
                    f"the text of a prompt with images contains {found[0]}, which verl reads as the mark of an image",
                    remedy="write it differently in the text: images are separate parts",
                )
        written.append({**message, "content": "".join(texts)} if isinstance(content, list) else dict(message))
    return written, urls_in(messages)


def _as_mark(part: Any) -> str:
    if url_of(part) is not None:
        return PLACE
    if isinstance(part, dict) and part.get("type") == "text":
        return str(part.get("text") or "")
    kind = part.get("type") if isinstance(part, dict) else part
    raise TasksetError(f"verl's rows cannot hold a part of type {kind!r}", remedy="use text and image_url parts")


def to_empty_parts(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return messages as parts, with `{"type": "image"}` for each image, and the images."""
    written = [_map_parts(message, lambda part: part if url_of(part) is None else _EMPTY) for message in messages]
    return written, urls_in(messages)


_EMPTY = {"type": "image"}


def to_parts(messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
    """Turn text contents into lists of one part, and return which ones they were: a parquet column has one type."""
    texts = [number for number, message in enumerate(messages) if isinstance(message.get("content"), str)]
    return list(map(with_part, messages)), texts


def with_part(message: Any) -> Any:
    """Turn a message's text content into a list of one part."""
    content = message.get("content") if isinstance(message, dict) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def fill_parts(messages: Sequence[Message], urls: Sequence[str]) -> list[Message]:
    """Fill these addresses into the empty image parts."""
    left = iter(urls)
    return [_map_parts(message, lambda part: _with_url(part, left)) for message in messages]


def _map_parts(message: Message, change: Callable[[Any], Any]) -> Message:
    content = message.get("content")
    return {**message, "content": list(map(change, content))} if isinstance(content, list) else message


def _with_url(part: Any, urls: Iterator[str]) -> Any:
    if url_of(part) is None:
        return part
    image, url = part["image_url"], next(urls)
    return {**part, "image_url": {**image, "url": url} if isinstance(image, dict) else url}


def note_images(note: dict[str, Any], messages: Sequence[Message], written: Sequence[Message]) -> None:
    """Add to the note what the written prompt and the image column do not say about the messages."""
    urls = urls_in(messages)
    plain = read_column(urls) or urls
    if odd := {str(at): url.partition(",")[0] for at, url in enumerate(urls) if url != plain[at]}:
        note["urls"] = odd
    if join_images(written, urls) != list(messages):
        note["parts"] = fill_parts(messages, [""] * len(urls))  # the column has them


# From rows


def restore_prompt(row: Mapping[str, Any], prompt: Any, note: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return a row's prompt with its images, in which contents that were text are text again, and whether the row's
    image column really holds images."""
    if "texts" in note and isinstance(prompt, list):
        prompt = [_as_text(message) if at in note["texts"] else message for at, message in enumerate(prompt)]
    urls = read_column(row[IMAGES]) if IMAGES in row else None
    if urls is None or not prompt:
        return prompt, False
    for at, kind in note.get("urls", {}).items():
        urls[int(at)] = f"{kind},{urls[int(at)].partition(',')[2]}"
    if "parts" in note:
        return fill_parts(note["parts"], urls), True
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return join_images(messages, urls), True
    except ValueError as error:
        remedy = f"write {PLACE} in the text where each image goes; see `treetune validate`"
        raise TasksetError(str(error), remedy=remedy) from None


def _as_text(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or len(content) != 1:
        return message
    return {**message, "content": content[0].get("text", "")}


def read_column(value: Any) -> list[str] | None:
    """Return the addresses in an image column, or None if it holds something else."""
    if not isinstance(value, list) or not all(map(_is_image, value)):
        return None
    urls = []
    for number, item in enumerate(value):
        try:
            urls.append(_read(item))
        except ValueError as error:
            raise TasksetError(f"image {number} is unreadable: {error}", remedy="see `treetune validate`") from None
    return urls


def _is_image(item: Any) -> bool:
    if isinstance(item, str):
        return item[:5].lower() == "data:" or "://" in item or item.lower().endswith(SUFFIXES)
    return isinstance(item, dict) and not {"bytes", "path", "image", "url"}.isdisjoint(item)


def _read(item: Any) -> str:
    data = data_in(item)
    if data is not None:
        return to_url(data)
    name = name_in(item)
    if "://" in name:
        return name
    if not trusts():
        raise TasksetError(
            f"a row names the image {name!r} on this machine, but rows are untrusted",
            remedy=f"check the rows, then set {TRUST}=1; or write them with the images' bytes: `treetune build`",
        )
    return to_url(open_image(name))


def data_in(item: Any) -> bytes | None:
    """Return the bytes that an item of the column holds, or None if it only names an image. Raises ValueError."""
    if isinstance(item, dict) and item.get("bytes") is not None:
        data = item["bytes"]
        return decode_url(f"data:;base64,{data}") if isinstance(data, str) else bytes(data)
    return decode_url(name_in(item))


def name_in(item: Any) -> str:
    """Return the address or path in an item without bytes."""
    if isinstance(item, str):
        return item
    name = next((item[key] for key in ("image", "url", "path") if isinstance(item.get(key), str)), None)
    if name is None:
        raise ValueError("neither bytes nor an address")
    return str(name)


def open_image(path: str) -> bytes:
    from pathlib import Path

    place = Path(path).expanduser()
    if place.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} does not end in {', '.join(SUFFIXES)}")
    try:
        with place.open("rb") as file:
            data = file.read()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    check_image(data)
    return data


def join_images(messages: Sequence[Message], urls: Sequence[str]) -> list[Message]:
    """Put the images where their marks are: parts `{"type": "image"}`, or `<image>` in the text. Without marks, they go
    before the user's first text. Raises ValueError if the numbers differ."""
    marks = count_marks(messages)
    if urls and not marks:
        messages = _mark_first(messages, len(urls))
    elif marks != len(urls):
        raise ValueError(f"{len(urls)} images, but {marks} places for them in the prompt")
    left = iter(urls)
    if _has_empty_parts(messages):
        return [
            _map_parts(message, lambda part: image_part(next(left)) if part == _EMPTY else part) for message in messages
        ]
    return [_split_text(message, left) for message in messages]


def count_marks(messages: Sequence[Message]) -> int:
    if _has_empty_parts(messages):
        return sum(part == _EMPTY for _, part in _iter_parts(messages))
    return sum(text.count(PLACE) for text, _ in _iter_parts(messages))


def _has_empty_parts(messages: Sequence[Message]) -> bool:
    return any(part == _EMPTY for _, part in _iter_parts(messages))


def _iter_parts(messages: Sequence[Message]) -> Iterator[tuple[str, Any]]:
    """Yield each part with its text, which is empty unless it is a text part."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            yield text if isinstance(text, str) else "", part


def _mark_first(messages: Sequence[Message], count: int) -> list[Message]:
    place = next((number for number, message in enumerate(messages) if message.get("role") == "user"), None)
    if place is None:
        raise ValueError(f"{count} images, but no user message to put them in")
    message = messages[place]
    content = message.get("content")
    content = [_EMPTY] * count + content if isinstance(content, list) else PLACE * count + (content or "")
    return [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]


def _split_text(message: Message, urls: Iterator[str]) -> Message:
    """Split a message at the marks in its text into parts."""
    content = message.get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not count_marks([message]):
        return message
    parts: list[Any] = []
    for part in texts:
        if not isinstance(part, dict) or part.get("type") != "text" or PLACE not in str(part.get("text")):
            parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(PLACE)):
            parts += [image_part(next(urls))] if number else []
            parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


# Parquet columns


def image_type() -> pa.DataType:
    """Return the type in which the `datasets` library stores a list of images."""
    import pyarrow as pa

    return pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def image_column(values: Sequence[Any]) -> pa.Array | None:
    """Return columns of addresses as a column of bytes, or of addresses if some only name an image. None if this is not
    an image column."""
    import pyarrow as pa

    found = [value if value is None else read_column(value) for value in values]
    if any(value is not None and urls is None for value, urls in zip(values, found, strict=True)):
        return None
    if not all(url.startswith("data:") for urls in found for url in urls or ()):
        return pa.array(found, pa.list_(pa.string()))
    rows = [None if urls is None else [{"bytes": decode_url(url)} for url in urls] for urls in found]
    return pa.array(rows, image_type())
