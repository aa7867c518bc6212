"""Rules of images: as many as the prompt has places for, small enough, and readable.

Headers are read of every image; where Pillow is installed, every image is decoded. Nothing is fetched.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treetune.chat.images import MOST_BYTES, MOST_PIXELS, check_image, is_remote, read_header, url_of
from treetune.core.finding import WARNING
from treetune.data.rows.image_columns import COLUMN, count_marks, data_in, name_in
from treetune.data.validate.rules import Fault, add_rule, show

if TYPE_CHECKING:
    from treetune.data.validate.files import RowCheck

add_rule(
    "image-count",
    "as many images as places: <image> in verl's text, parts of the type image for TRL; SkyRL has them in parts alone",
    "add the images or the places that are missing",
)
add_rule("image-unreadable", "PNG, JPEG, WebP or GIF, whole", "write the image again, or leave the row out")
add_rule(
    "image-size",
    f"at most {MOST_BYTES >> 20} MB and {MOST_PIXELS:,} pixels",
    "make it smaller (max_pixels in a dataset task)",
)
add_rule(
    "image-elsewhere",
    "the image itself: what is only named must be there for every process of the trainer",
    "put the bytes into the row",
    WARNING,
)

_OTHER_MARKS = re.compile("<video>|<audio>")


def check_images(row: Mapping[str, Any], check: RowCheck) -> Iterator[Fault]:
    if not check.contents:
        return
    prompt, images = row.get("prompt"), row.get(COLUMN)
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
        faults["image-unreadable"] = f"no list of images, {show(images)}"
    yield from faults.items()


def _miscount(messages: list[dict[str, Any]], images: list[Any], check: RowCheck) -> str | None:
    if check.format.name == "skyrl":
        return f"{len(images)} in a column that SkyRL does not read" if images else None
    texts = [one["content"] for one in messages if isinstance(one.get("content"), str)]
    if images and check.format.name == "verl" and (found := _OTHER_MARKS.search(" ".join(texts))):
        return f"{found[0]} in the text, for which there is nothing"
    places = count_marks(messages)
    if check.format.name == "trl" and not places and len(texts) == len(messages):
        return None  # TRL puts them first
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
    """What is wrong with an image as a whole; None where nothing is, or Pillow is not there to tell."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # whatever a damaged file makes a decoder raise
        return f"it cannot be decoded: {error}"
    return None
