"""Images in prompts: OpenAI's `image_url` parts, image formats and sizes, and labels for display.

    part = image_part(to_url(data))     # {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    read_header(data)                   # Header("png", 640, 480)
    label(url_of(part))                 # "png 640 x 480, 12,345 bytes, 3f2a91c0"

Supports PNG, JPEG, WebP and GIF, detected by content and never by name. Nothing here fetches an address.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treetune.chat.message import Message
from treetune.errors import truncate

MOST_BYTES = 20 << 20
"""The maximum size of one image, as accepted by common endpoints."""
MOST_PIXELS = 89_478_485
"""The number of pixels above which PIL warns of a decompression bomb."""

_DATA = re.compile(r"data:(?P<kind>[\w.+-]+/[\w.+-]+)?(?:;[\w=-]+)*?;base64,", re.IGNORECASE)
_REMOTE = re.compile(r"https?://[^\s/]", re.IGNORECASE)


class Header(NamedTuple):
    """The format and size in an image's header. The image is not decoded."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> Header:
    """Read the header. Raises ValueError if the data is not an image, is cut off, or has no size."""
    if not data:
        raise ValueError("0 bytes")
    for mark, read in _READERS.items():
        if data.startswith(mark):
            try:
                header = read(data)
            except (struct.error, IndexError):
                raise ValueError(f"its {read.__name__.removeprefix('_read_').upper()} header is cut off") from None
            if header.width < 1 or header.height < 1:
                raise ValueError(f"a {header.format} of {header.width} x {header.height} pixels")
            return header
    raise ValueError(f"{_guess(data)}, not PNG, JPEG, WebP or GIF")


def check_image(data: bytes, most_bytes: int = MOST_BYTES) -> Header:
    """Return the header of an image that can be sent; raises ValueError with the problem otherwise."""
    refuse_large(len(data), most_bytes)
    header = read_header(data)
    if header.width * header.height > MOST_PIXELS:
        raise ValueError(f"{header.width} x {header.height} pixels, more than {MOST_PIXELS:,}")
    return header


def refuse_large(size: int, most_bytes: int = MOST_BYTES) -> None:
    if size > most_bytes:
        raise ValueError(f"{size:,} bytes, more than {most_bytes:,}")


# Each raises struct.error or IndexError if its data is cut off.


def _read_png(data: bytes) -> Header:
    width, height = struct.unpack(">II", data[16:24])
    at, name = 8, b""
    while name != b"IEND":
        length, name = struct.unpack(">I4s", data[at : at + 8])
        if name == b"IEND" and length == 0:
            break
        at += 12 + length
        if at > len(data):
            raise ValueError(f"a PNG that is cut off after {len(data):,} bytes")
    return Header("png", width, height)


def _read_jpeg(data: bytes) -> Header:
    at = 2
    while True:
        mark, kind, length = struct.unpack(">BBH", data[at : at + 4])
        if mark != 0xFF:
            raise ValueError("a JPEG whose segments do not follow each other")
        if kind == 0xFF:  # fill bytes
            at += 1
            continue
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            if data.find(b"\xff\xd9", at) < 0:
                raise ValueError(f"a JPEG that is cut off after {len(data):,} bytes")
            return Header("jpeg", width, height)
        at += 2 + length


def _read_gif(data: bytes) -> Header:
    if data.rstrip(b"\0")[-1:] != b";":
        raise ValueError(f"a GIF that is cut off after {len(data):,} bytes")
    return Header("gif", *struct.unpack("<HH", data[6:10]))


def _read_webp(data: bytes) -> Header:
    size, name, chunk = struct.unpack("<I4s4s", data[4:16])
    if name != b"WEBP":
        raise ValueError("RIFF data that is not a WebP")
    if size + 8 > len(data):
        raise ValueError(f"a WebP that is cut off after {len(data):,} bytes")
    if chunk == b"VP8X":
        sides = [int.from_bytes(data[start : start + 3], "little") + 1 for start in (24, 27)]
        return Header("webp", *sides)
    if chunk == b"VP8L":
        (bits,) = struct.unpack("<I", data[21:25])
        return Header("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    width, height = struct.unpack("<HH", data[26:30])
    return Header("webp", width & 0x3FFF, height & 0x3FFF)


_READERS = {
    b"\x89PNG\r\n\x1a\n": _read_png,
    b"\xff\xd8\xff": _read_jpeg,
    b"GIF87a": _read_gif,
    b"GIF89a": _read_gif,
    b"RIFF": _read_webp,
}


def _guess(data: bytes) -> str:
    start = data[:512].lstrip().lower()
    if b"<svg" in start:
        return "SVG"
    if start.startswith((b"<!doctype html", b"<html")):
        return "HTML"
    known = {b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF"}
    return next((name for mark, name in known.items() if data.startswith(mark)), f"bytes that begin with {data[:8]!r}")


# Addresses


def to_url(data: bytes | bytearray | memoryview | str | Path) -> str:
    """The data URL of an image, given as bytes or a file path. Equal bytes give equal URLs."""
    data = Path(data).read_bytes() if isinstance(data, str | Path) else bytes(data)
    return f"data:image/{read_header(data).format};base64,{b64encode(data).decode()}"


def decode_url(url: str) -> bytes | None:
    """The bytes of a data URL; None for any other address. Raises ValueError if they are damaged."""
    if url[:5].lower() != "data:":
        return None
    match = _DATA.match(url[:200])
    if match is None:
        raise ValueError("a data URL without ;base64,")
    try:
        return b64decode(url[match.end() :], validate=True)
    except binascii.Error as error:
        raise ValueError(f"a data URL whose base64 is damaged: {error}") from None


def is_address(text: str) -> bool:
    """Whether it can be an image address: a data URL, a web address, or a file that a model server may read."""
    return text[:5].lower() == "data:" or text[:7].lower() == "file://" or is_remote(text)


def is_remote(text: str) -> bool:
    return _REMOTE.match(text) is not None


# Parts of messages


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def url_of(part: Any) -> str | None:
    """The address in an `image_url` part; None for any other part."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def urls_in(messages: Sequence[Message]) -> list[str]:
    """The addresses of all images in a conversation, in order."""
    return list(_iter_urls(messages))


def has_images(messages: Sequence[Message]) -> bool:
    return next(_iter_urls(messages), None) is not None


def _iter_urls(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (url for part in content if (url := url_of(part)) is not None)


# Display


def label(url: str) -> str:
    """A short description of an image: format, size, hash; never its base64."""
    try:
        data = decode_url(url)
    except ValueError as error:
        return str(error)
    if data is None:
        return f"at {truncate(url, 200)}"
    name = hashlib.blake2b(data, digest_size=4).hexdigest()
    try:
        header = read_header(data)
    except ValueError as error:
        return f"unreadable: {error}, {name}"
    return f"{header.format} {header.width} x {header.height}, {len(data):,} bytes, {name}"


def name_images(content: Any) -> Any:
    """The content of a message as text, with labels instead of images; unchanged if it is not a list of parts."""
    if not isinstance(content, list):
        return content
    shown = []
    for part in content:
        url = url_of(part)
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        shown.append(str(text) if url is None else f"[image: {label(url)}]")
    return "\n".join(shown)


def name_all(value: Any) -> Any:
    """Replace all images in a value by labels, at any depth."""
    if isinstance(value, str):
        return f"[image: {label(value)}]" if value.startswith("data:image/") else value
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    if isinstance(value, Mapping):
        return {key: name_all(item) for key, item in value.items()}
    return [name_all(item) for item in value] if isinstance(value, list | tuple) else value


def shorten(value: Any, most: int = 60) -> str:
    """A value for display: shortened, with images replaced by labels."""
    return truncate(repr(name_all(value)), most)
