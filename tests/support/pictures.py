"""Small pictures, written without PIL."""

from __future__ import annotations

import struct
import zlib

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}


def png(colour: tuple[int, int, int], width: int = 8, height: int = 6) -> bytes:
    """A PNG of one colour."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes(colour) * width) * height)
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, (b"IHDR", b"IDAT", b"IEND"), (header, pixels, b"")))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def colour_of(data: bytes) -> str:
    """The name of the colour of such a PNG, out of its pixels."""
    size = struct.unpack(">I", data[33:37])[0]
    assert data[37:41] == b"IDAT"
    pixels = zlib.decompress(data[41 : 41 + size])
    return next(name for name, colour in COLOURS.items() if tuple(pixels[1:4]) == colour)
