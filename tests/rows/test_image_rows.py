"""Images in rows: as each trainer takes them, in every kind of file, and the same task again."""

from __future__ import annotations

import json
from itertools import product

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import BLUE, GREEN, RED, png
from raising import raises_code

import datasets
from treetune import Task
from treetune.chat.images import image_part, to_url, urls_in
from treetune.data.rows.formats import FORMATS, IN_PARQUET, task_to_score
from treetune.data.rows.reading import read_rows, read_tasks
from treetune.data.rows.writing import write_file
from treetune.data.validate.files import validate
from treetune.errors import TreetuneError

FILES = ("parquet", "jsonl", "json")


def text(said: str) -> dict:
    return {"type": "text", "text": said}


ASKED = Task(
    prompt=[
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [text("Is "), image_part(to_url(png(RED))), text(" redder than "),
                                     image_part(to_url(png(BLUE))), text("?")]},
    ],
    reward_spec={"method": "rule", "ground_truth": "yes"},
    data_source="colours",
)  # fmt: skip


def written(tmp_path, tasks, format, kind="parquet"):
    path = tmp_path / f"{format}.{kind}"
    write_file(tasks, path, format, scorer="rule")
    return path


def test_verl_gets_text_with_places_and_a_column_of_bytes(tmp_path):
    path = written(tmp_path, [ASKED], "verl")
    (row,) = pq.read_table(path).to_pylist()
    assert row["prompt"][1] == {"role": "user", "content": "Is <image> redder than <image>?"}
    assert row["images"] == [{"bytes": png(colour), "path": None} for colour in (RED, BLUE)]
    (line,) = read_rows(written(tmp_path, [ASKED], "verl", "jsonl"))
    assert line["images"] == [to_url(png(RED)), to_url(png(BLUE))]


def test_trl_gets_empty_parts_and_the_same_column(tmp_path):
    (row,) = pq.read_table(written(tmp_path, [ASKED], "trl")).to_pylist()
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == [text("Look.")]
    assert [part["type"] for part in row["prompt"][1]["content"]] == ["text", "image", "text", "image", "text"]
    assert [image["bytes"] for image in row["images"]] == [png(RED), png(BLUE)]


def test_skyrl_gets_openais_parts(tmp_path):
    (row,) = read_rows(written(tmp_path, [ASKED], "skyrl"))
    assert "images" not in row
    assert row["prompt"][1] == ASKED.prompt[1]
    assert row["prompt"][0]["content"] == [text("Look.")]


def test_trainers_loader_gives_the_column_as_pictures(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    for format in ("verl", "trl"):
        path = str(written(tmp_path, [ASKED, Task(prompt="No picture.")], format))
        rows = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=tmp_path / "library")
        assert rows.features["images"] == datasets.List(datasets.Image())
        assert [image.getpixel((0, 0)) for image in rows[0]["images"]] == [RED, BLUE]
        assert rows[1]["images"] is None


PARTS = st.one_of(
    st.builds(text, st.text("ab <>\n", max_size=5)),
    st.sampled_from([RED, GREEN, BLUE]).map(png).map(to_url).map(image_part),
    st.just(image_part(to_url(png(RED)).replace("image/png", "image/x-odd"))),
    st.just({"type": "image_url", "image_url": {"url": to_url(png(BLUE)), "detail": "low"}}),
    st.just({"type": "image_url", "image_url": {"url": to_url(png(BLUE))}, "cache_control": {"type": "ephemeral"}}),
)
CONTENTS = st.one_of(st.text("ab <>", min_size=1, max_size=5), st.lists(PARTS, min_size=1, max_size=5))
PROMPTS = st.one_of(
    st.text("ab", min_size=1, max_size=5),
    st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS}),
        min_size=1,
        max_size=3,
    ),
)
TASKS = st.builds(lambda prompt: Task(prompt=prompt, reward_spec={"method": "rule", "ground_truth": "1"}), PROMPTS)


@given(st.lists(TASKS, min_size=1, max_size=4), st.permutations(["verl", "skyrl", "trl"]), st.permutations(FILES))
def test_any_prompt_with_images_survives_every_format_in_turn(tmp_path_factory, tasks, formats, kinds):
    folder = tmp_path_factory.mktemp("rows")
    source = tasks
    for number, (format, kind) in enumerate([*zip(formats, kinds, strict=True), ("nemo-gym", "jsonl")]):
        path = folder / f"{number}.{kind}"
        write_file(source, path, format, scorer="rule" if number == 0 else None)
        source = read_tasks(path)
    assert [(task.prompt, task.uid) for task in read_tasks(path)] == [(task.prompt, task.uid) for task in tasks]


def test_files_of_every_kind_are_the_same_tasks_and_valid(tmp_path):
    for format, kind in [*product(IN_PARQUET, FILES), ("nemo-gym", "jsonl")]:
        path = written(tmp_path, [ASKED], format, kind)
        assert [task.uid for task in read_tasks(path)] == [ASKED.uid]
        assert validate(path).findings == [], (format, kind)


def test_a_reward_function_of_verl_gets_the_whole_task(tmp_path):
    row = FORMATS["verl"].row_of(ASKED, scorer='{"id": "some"}')
    task = task_to_score("colours", "yes", json.loads(json.dumps(row["extra_info"])))
    assert (task.messages, task.uid) == (ASKED.messages, ASKED.uid)


def test_what_verl_would_take_for_an_image_is_refused(tmp_path):
    for said in ("<image>", "<video>"):
        task = Task(prompt=[{"role": "user", "content": [image_part(to_url(png(RED))), text(f"a {said} tag")]}])
        with pytest.raises(
            TreetuneError, match=f"task 0: .* contains {said}, which verl reads as the mark of an image"
        ):
            written(tmp_path, [task], "verl")
        assert next(read_tasks(written(tmp_path, [task], "skyrl"))).uid == task.uid
    alone = Task(prompt="Write an <image> tag.")
    assert list(read_tasks(written(tmp_path, [alone], "verl"))) == [alone]


@pytest.mark.parametrize("item", ["cat.png", {"path": "cat.png"}, {"image": "./cat.png"}, "/etc/motd.png"])
def test_rows_do_not_read_files_of_this_machine_unless_trusted(tmp_path, monkeypatch, item):
    (tmp_path / "cat.png").write_bytes(png(RED))
    monkeypatch.chdir(tmp_path)
    row = {"prompt": [{"role": "user", "content": "<image>?"}], "reward_model": {"ground_truth": "1"}, "images": [item]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with raises_code("taskset", "rows.jsonl", "line 1"):
        list(read_tasks("rows.jsonl"))
    monkeypatch.setenv("TREETUNE_TRUST", "1")
    if item != "/etc/motd.png":
        (task,) = read_tasks("rows.jsonl")
        assert urls_in(task.messages) == [to_url(png(RED))]


def test_rows_that_others_wrote_are_read_and_what_is_wrong_names_the_row(tmp_path):
    def rows(images, content="<image>What?"):
        path = tmp_path / "rows.jsonl"
        prompt = [{"role": "user", "content": content}]
        path.write_text(json.dumps({"prompt": prompt, "reward_model": {"ground_truth": "1"}, "images": images}))
        return list(read_tasks(path))

    url = to_url(png(RED))
    base64 = url.partition(",")[2]
    for item in (url, {"bytes": base64}, {"image": url}, {"url": url}):
        assert urls_in(rows([item])[0].messages) == [url]
    assert urls_in(rows(["https://example.org/a"])[0].messages) == ["https://example.org/a"]
    assert rows([url], "What?")[0].messages[0]["content"] == [image_part(url), text("What?")]
    assert rows(["blue", "green"], "What?")[0].extra_info["images"] == ["blue", "green"]
    with raises_code("taskset", "line 1", "2 images", "1 places"):
        rows([url, url])
    with raises_code("taskset", "line 1", "image 0"):
        rows([{"bytes": "AAAA"}])


def test_bytes_and_addresses_share_no_column(tmp_path):
    elsewhere = Task(prompt=[{"role": "user", "content": [image_part("https://example.org/a.png")]}])
    path = written(tmp_path, [ASKED, elsewhere], "verl")
    assert list(read_tasks(path)) == [ASKED, elsewhere]  # of one batch: all become addresses
    (row, _) = pq.read_table(path).to_pylist()
    assert row["images"] == [to_url(png(RED)), to_url(png(BLUE))]
