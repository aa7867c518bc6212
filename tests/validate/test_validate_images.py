"""What `treetune validate` says of images."""

from __future__ import annotations

import struct
import sys
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import BLUE, RED, png

from treetune.chat.images import MOST_BYTES, MOST_PIXELS, image_part, to_url
from treetune.data.rows.image_columns import image_type
from treetune.data.validate.files import validate
from treetune.data.validate.row import check_row
from treetune.data.validate.rules import RULES, RowContext

URL = to_url(png(RED))


def row(images, content="<image>What?", **columns):
    return {"prompt": [{"role": "user", "content": content}], "images": images, **columns}


def found(row, format="verl"):
    faults = check_row(
        row | {"reward_model": {"style": "rule", "ground_truth": "1"}} | {"ground_truth": "1"}, RowContext(format)
    )
    return {rule: said for rule, said in faults if rule.startswith("image")}


def decodable(data: bytes) -> bytes:
    """A whole PNG whose pixels are damaged: only a decoder finds that."""
    size = struct.unpack(">I", data[33:37])[0]
    noise = bytes(size)
    return data[:41] + noise + struct.pack(">I", zlib.crc32(b"IDAT" + noise)) + data[45 + size :]


@pytest.mark.parametrize(
    ("broken", "rule", "said"),
    [
        (row([URL, URL]), "image-count", "2 images, 1 places"),
        (row([URL], "What?"), "image-count", "1 images, 0 places"),
        (row([], "<image>?"), "image-count", "0 images, 1 places"),
        (row([URL], "<image><video>?"), "image-count", "<video> in the text"),
        (row([{"bytes": b""}]), "image-unreadable", "0 bytes"),
        (row([{"bytes": png(RED)[:50]}]), "image-unreadable", "cut off after 50 bytes"),
        (row([{"bytes": b"<svg/>"}]), "image-unreadable", "SVG"),
        (row(["data:text/html;base64,PGh0bWw+"]), "image-unreadable", "HTML"),
        (row([{"width": 3}]), "image-unreadable", "neither bytes nor an address"),
        (row([7]), "image-unreadable", ""),
        (row("cat.png"), "image-unreadable", "not a list of images"),
        (row(["s3://bucket/cat.png"]), "image-unreadable", "which trainers do not fetch"),
        (row([{"bytes": png(RED) + bytes(MOST_BYTES)}]), "image-size", "20,971,5"),
        (row([{"bytes": png(RED)[:16] + struct.pack(">II", 50_000, 50_000) + png(RED)[24:]}]), "image-size", "50000 x"),
        (row(["https://example.org/cat.png"]), "image-elsewhere", "https://example.org/cat.png"),
        (row(["pictures/cat.png"]), "image-elsewhere", "pictures/cat.png"),
    ],
)
def test_each_fault_is_told_by_its_rule(broken, rule, said):
    faults = found(broken)
    assert faults.keys() == {rule}
    assert said in faults[rule]
    assert len(faults[rule]) < 200


def test_a_decoder_finds_what_no_header_shows(monkeypatch):
    damaged = row([{"bytes": decodable(png(RED))}])
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert found(damaged) == {}
    monkeypatch.delitem(sys.modules, "PIL")
    pytest.importorskip("PIL")
    assert "cannot be decoded" in found(damaged)["image-unreadable"]


def test_each_trainer_has_its_own_places_for_images():
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert found(row([URL], parts), "trl") == {}
    assert found(row([URL], "What?"), "trl") == {}  # it puts them first
    assert found(row([URL, URL], parts), "trl") == {"image-count": "2 images, 1 places"}
    skyrl = {"prompt": [{"role": "user", "content": [image_part(URL)]}]}
    assert found(skyrl, "skyrl") == {}
    assert "SkyRL does not read" in found(row([URL]), "skyrl")["image-count"]
    broken = {"prompt": [{"role": "user", "content": [image_part("data:image/png;base64,AAAA")]}]}
    assert found(broken, "skyrl").keys() == {"image-unreadable"}
    assert found({"prompt": [{"role": "user", "content": "an <image> tag"}]}) == {}


def test_files_are_checked_row_by_row_and_quick_reads_no_bytes(tmp_path, monkeypatch):
    rows = [row([{"bytes": data}]) for data in (png(RED), png(BLUE), png(RED)[:50], png(RED))]
    prompts = pa.array([one["prompt"] for one in rows])
    truths = pa.array([{"style": "rule", "ground_truth": "1"}] * len(rows))
    table = {"prompt": prompts, "reward_model": truths, "images": pa.array([r["images"] for r in rows], image_type())}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    report = validate(tmp_path / "rows.parquet")
    faults = {one.rule: one.rows for one in report.findings}
    assert faults["image-unreadable"] == [2]
    assert faults["duplicate-prompts"] == [3]  # the same text is another prompt with another image

    read = []
    monkeypatch.setattr("treetune.data.validate.prompt_rules.data_in", read.append)
    assert "image-unreadable" not in {one.rule for one in validate(tmp_path / "rows.parquet", quick=True).findings}
    assert read == []


def test_the_command_names_rule_and_row(treetune, tmp_path):
    import json

    lines = [row([URL]), row([URL, URL])]
    for line in lines:
        line["reward_model"] = {"style": "rule", "ground_truth": "1"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = treetune("validate", "rows.jsonl")
    assert result.code == 1
    assert "image-count" in result.out
    assert "line 2" in result.out
    assert "base64" not in result.out


def test_the_rule_for_the_size_of_images_says_the_limits():
    assert RULES["image-size"].expected == f"at most {MOST_BYTES >> 20} MB and {MOST_PIXELS:,} pixels"
