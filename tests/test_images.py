"""Images by their bytes: what they are, what is wrong with them, and that no screen shows their base64."""

from __future__ import annotations

import io
import struct
from base64 import b64encode

import pytest
from pictures import RED, png
from raising import raises_code

from treetune import Task, Taskset
from treetune.chat.images import (
    MOST_BYTES,
    Header,
    check_image,
    decode_url,
    image_part,
    label,
    name_images,
    read_header,
    to_url,
    urls_in,
)
from treetune.chat.tokens import NO_IMAGES, ChatTokens
from treetune.errors import UsageError


def test_a_header_says_format_and_size_without_any_library():
    assert read_header(png(RED, 31, 17)) == Header("png", 31, 17)


@pytest.mark.parametrize(
    ("format", "options", "mode"),
    [
        ("PNG", {}, "RGB"),
        ("PNG", {}, "P"),
        ("JPEG", {}, "RGB"),
        ("JPEG", {"progressive": True}, "L"),
        ("WEBP", {}, "RGB"),
        ("WEBP", {"lossless": True}, "RGB"),
        ("WEBP", {}, "RGBA"),
        ("GIF", {}, "P"),
    ],
)
def test_it_says_what_pillow_says(format, options, mode):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.effect_noise((61, 35), 50).convert(mode).save(buffer, format, **options)
    data = buffer.getvalue()
    assert read_header(data) == Header(format.lower(), 61, 35)
    for cut in (2, len(data) // 3, len(data) // 2, len(data) - 5):
        with pytest.raises(ValueError, match=r"cut off|begin"):
            read_header(data[:cut])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes"),
        (png(RED)[:20], "header is cut off"),
        (png(RED)[:50], "cut off after 50 bytes"),
        (png(RED, 0, 5), "a png of 0 x 5 pixels"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG, not PNG, JPEG, WebP or GIF"),
        (b"<?xml version='1.0'?>\n<svg/>", "SVG"),
        (b"<!DOCTYPE html><html><script>alert(1)</script></html>", "HTML, not"),
        (b"BM" + bytes(60), "BMP, not"),
        (b"RIFF\x04\0\0\0WAVEfmt ", "not a WebP"),
        (b"\xff\xd8\xff\xe0\0\x10", "cut off"),
        (b"hello", "bytes that begin with b'hello', not"),
    ],
)
def test_what_is_no_whole_image_is_told(data, said):
    with pytest.raises(ValueError, match=said):
        read_header(data)


def test_what_is_too_large_is_told_before_it_is_decoded():
    with pytest.raises(ValueError, match=f"more than {MOST_BYTES:,}"):
        check_image(png(RED) + bytes(MOST_BYTES))
    bomb = bytearray(png(RED))
    bomb[16:24] = struct.pack(">II", 100_000, 100_000)
    with pytest.raises(ValueError, match="100000 x 100000 pixels"):
        check_image(bytes(bomb))


def test_a_data_url_holds_the_bytes_and_any_other_address_none():
    data = png(RED)
    assert decode_url(to_url(data)) == data
    assert decode_url("data:image/jpg;base64," + b64encode(data).decode()) == data
    assert decode_url("https://example.org/cat.png") is None
    for damaged in ("data:image/png,plain", "data:image/png;base64,?"):
        with pytest.raises(ValueError, match="a data URL"):
            decode_url(damaged)


def test_an_image_is_named_and_its_base64_never_shown():
    url = to_url(png(RED, 4, 3))
    parts = [{"type": "text", "text": "What is"}, image_part(url), image_part("https://example.org/cat.png")]
    shown = name_images(parts)
    assert shown.startswith("What is\n[image: png 4 x 3, 73 bytes, ")
    assert "https://example.org/cat.png" in shown
    assert "base64" not in shown
    assert label("data:image/png;base64,AAAA").startswith("unreadable: ")
    assert urls_in([{"role": "user", "content": parts}]) == [url, "https://example.org/cat.png"]


def test_a_tokenizer_refuses_images():
    chat = ChatTokens(object())
    with pytest.raises(UsageError, match=NO_IMAGES):
        chat.prompt([{"role": "user", "content": [image_part(to_url(png(RED)))]}])


def test_an_image_is_given_by_its_file_too(tmp_path):
    (tmp_path / "dot.png").write_bytes(png(RED))
    assert to_url(tmp_path / "dot.png") == to_url(str(tmp_path / "dot.png")) == to_url(png(RED))
    assert to_url(bytearray(png(RED))) == to_url(memoryview(png(RED))) == to_url(png(RED))


def test_a_task_whose_image_only_this_machine_could_read_is_refused():
    class Pictures(Taskset):
        address = "pictures/a.png"

        def load_tasks(self):
            return [Task(prompt=[{"role": "user", "content": [image_part(self.address)]}])]

    with raises_code("taskset", "task 0", "'pictures/a.png'") as told:
        Pictures().select_tasks()
    assert "image_part(to_url(path))" in told.value.remedy
    Pictures.address = "file:///pictures/a.png"  # which a server beside us may have been told to read
    assert len(Pictures().select_tasks()) == 1
