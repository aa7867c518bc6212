"""Reads the images of a dataset task (paths, bytes, URLs and PIL objects) once each, and checks them.

    reader = ImageReader(config)
    reader.read({"bytes": b"...", "path": "cat.png"})      # ["data:image/png;base64,..."]

A path is relative to the folder of the data file, or to `image_folder`, and cannot leave it: rows are untrusted, and
must not put files from this machine into prompts. A URL is kept and never fetched.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from treetune.chat.images import MOST_BYTES, check_image, decode_url, is_remote, refuse_large, to_url
from treetune.data.datasets.config import DatasetConfig
from treetune.data.rows.image_columns import SUFFIXES
from treetune.errors import MissingExtraError, TasksetError

NO_IMAGE = "no image"
"""The reason for dropping rows whose image column is null."""

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
MOST_FILES = 200_000
"""How many files next to the data are checked for whether an image changed."""


class ImageReader:
    def __init__(self, config: DatasetConfig) -> None:
        self._config = config
        # An image that will be resized may exceed the limit for sending.
        self._most_bytes = MOST_BYTES * (10 if config.max_pixels is not None else 1)

    def read(self, value: Any) -> list[str]:
        """Return the addresses of the images in a column's value: data URLs, or the URL of a remote image."""
        items = value if isinstance(value, list | tuple) else [value]
        urls = []
        for number, item in enumerate(items):
            try:
                urls.append(self._read_one(item))
            except ValueError as error:
                which = f"image {number} of {len(items)}" if len(items) > 1 else "the image"
                remedy = "correct the image, or leave the row out"
                raise TasksetError(f"{which} cannot be used: {error}", remedy=remedy) from None
        return urls

    def _read_one(self, item: Any) -> str:
        if isinstance(item, dict):  # the layout of the `datasets` library
            item = next((item[key] for key in ("bytes", "path", "image", "url") if item.get(key) is not None), None)
        if isinstance(item, bytes | bytearray | memoryview):
            return self._load(bytes(item))
        if isinstance(item, str | os.PathLike):
            return self._read_name(os.fspath(item))
        if hasattr(item, "save") and hasattr(item, "size"):  # a PIL image
            buffer = io.BytesIO()
            item.save(buffer, "PNG")
            return self._load(buffer.getvalue())
        raise ValueError(f"a {type(item).__name__} is not a path, an address, bytes or a PIL image")

    def _read_name(self, name: str) -> str:
        if (data := decode_url(name)) is not None:
            return self._load(data)
        if is_remote(name):
            return name
        if not name.strip():
            raise ValueError("its path is empty")
        if _BASE64.fullmatch(name):
            raise ValueError(f"{name[:20]!r}… looks like base64: write data:image/png;base64, before it")
        if "://" in name:
            raise ValueError(f"{name!r:.80} is neither a file here nor http(s)")
        return self._load(self._open(name))

    def _open(self, name: str) -> bytes:
        """Return the bytes of a file inside the folders, after following links."""
        if not self._folders:
            remedy = "set image_folder to the folder that holds them"
            raise TasksetError(f"the path {name!r}, in a dataset that is not on this machine", remedy=remedy)
        inside = [place for folder in self._folders if (place := (folder / name).resolve()).is_relative_to(folder)]
        if not inside:
            raise TasksetError(
                f"the path {name!r} leads out of {self._folders[0]}",
                remedy="rows are untrusted: set image_folder to the folder that images may be read from",
            )
        try:
            path = next((place for place in inside if place.is_file()), inside[0])
            if path.suffix.lower() not in SUFFIXES:
                raise ValueError(f"the name {name:.80} does not end in {', '.join(SUFFIXES)}")
            with path.open("rb") as file:
                refuse_large(os.fstat(file.fileno()).st_size, self._most_bytes)
                return file.read()
        except OSError as error:
            raise ValueError(f"{str(inside[0])[:200]}: {error.strerror or error}") from None

    def _load(self, data: bytes) -> str:
        header = check_image(data, self._most_bytes)
        most = self._config.max_pixels
        if most is not None and header.width * header.height > most:
            data = resize(data, most)
        refuse_large(len(data))
        return to_url(data)

    @cached_property
    def _folders(self) -> list[Path]:
        return image_folders(self._config)


def image_folders(config: DatasetConfig) -> list[Path]:
    """Return the folders that image paths are relative to, or none if the data is not local."""
    if config.image_folder is not None:
        return [Path(config.image_folder).expanduser().resolve()]
    places = config.loading_params.local_sources()
    return list(dict.fromkeys(place.resolve() if place.is_dir() else place.resolve().parent for place in places))


def describe_files(config: DatasetConfig) -> list[tuple[str, int, int]]:
    """Return the images that rows may name: path, size and modification time. Part of the cache key."""
    if config.image_folder is not None:
        return []  # its content is already part of the key
    files = list(_iter_images(image_folders(config)))
    return sorted(files)


def _iter_images(folders: list[Path]) -> Iterator[tuple[str, int, int]]:
    seen = 0
    for folder in folders:
        for place, folders_inside, names in os.walk(folder):
            # Images of an evaluation are not data: a run folder contains this file.
            hidden = [name for name in folders_inside if name.startswith(".")]
            for name in folders_inside[:] if "fingerprint.json" in names else hidden:
                folders_inside.remove(name)
            seen += len(names)
            if seen > MOST_FILES:
                raise TasksetError(
                    f"there are more than {MOST_FILES:,} files next to the data, in {folder}",
                    remedy="set image_folder to the folder that holds the images",
                )
            for name in names:
                if name.lower().endswith(SUFFIXES):
                    known = os.stat(os.path.join(place, name))
                    yield os.path.join(place, name), known.st_size, known.st_mtime_ns


def resize(data: bytes, most_pixels: int) -> bytes:
    """Shrink the image to at most this many pixels, in its own format. Of an animation, only the first frame is
    kept."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError.of("pillow", "images") from None
    try:
        with Image.open(io.BytesIO(data)) as image:
            format = "PNG" if image.format == "GIF" else image.format
            scale = math.sqrt(most_pixels / (image.width * image.height))
            size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
            if image.mode == "P":
                image = image.convert("RGBA")  # type: ignore[assignment]
            buffer = io.BytesIO()
            options = {"quality": 95} if format == "JPEG" else {"lossless": True} if format == "WEBP" else {}
            image.resize(size, Image.Resampling.LANCZOS).save(buffer, format, **options)
            return buffer.getvalue()
    except (OSError, SyntaxError) as error:
        raise ValueError(f"it cannot be decoded: {error}") from None
