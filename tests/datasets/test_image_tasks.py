"""Dataset tasks with images: where they come from, where they go in the prompt, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pictures import BLUE, COLOURS, GREEN, RED, png
from raising import raises_code

import datasets
from treetune.chat.images import decode_url, read_header, to_url, urls_in
from treetune.data.datasets.images import describe_files
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.reading import read_tasks
from treetune.data.sources.files import rows_within
from treetune.errors import ConfigError, TreetuneError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "library"))
    place = tmp_path / "data"
    place.mkdir()
    for name, colour in COLOURS.items():
        (place / f"{name}.png").write_bytes(png(colour))
    return place


def task_over(folder: Path, rows: list[dict], **config) -> DatasetTaskset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"args": ["json"], "kwargs": {"data_files": str(file), "split": "train"}}
    return make(source, folder, **config)


def make(source: dict, folder: Path, **config) -> DatasetTaskset:
    given = {"loading_params": source, "images": ["image"], "prompt_template": "{question}", **config}
    return DatasetTaskset(given, cache_dir=folder.parent / "cache")


def parts_of(taskset: DatasetTaskset, index: int = 0) -> list:
    """The last message: text, and the colours of images by their bytes."""
    content = taskset[index].messages[-1]["content"]
    names = {to_url(png(colour)): name for name, colour in COLOURS.items()}
    return [part["text"] if part["type"] == "text" else names[part["image_url"]["url"]] for part in content]


def test_images_stand_where_the_placeholders_are(folder):
    rows = [{"question": "Which is larger?", "image": ["red.png", "blue.png"]}]
    taskset = task_over(folder, rows, prompt_template="Look at <image> and at <image>. {question}")
    assert parts_of(taskset) == ["Look at ", "red", " and at ", "blue", ". Which is larger?"]


def test_without_placeholders_they_come_before_the_text(folder):
    rows = [{"question": "Which?", "image": ["red.png", "blue.png"], "other": "green.png"}]
    taskset = task_over(folder, rows, images=["image", "other"], system_prompt="Look.")
    assert parts_of(taskset) == ["red", "blue", "green", "Which?"]
    assert taskset[0].messages[0] == {"role": "system", "content": "Look."}


def test_a_placeholder_may_come_from_a_column(folder):
    taskset = task_over(folder, [{"question": "In <image>, find x.", "image": "red.png"}])
    assert parts_of(taskset) == ["In ", "red", ", find x."]


def test_the_only_text_column_is_not_the_one_of_the_paths(folder):
    assert parts_of(task_over(folder, [{"question": "Which?", "image": "red.png"}], prompt_template="{}")) == [
        "red",
        "Which?",
    ]


def test_messages_have_images_at_their_empty_parts_and_of_their_own(folder):
    asked = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Red."}]},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image", "text": None}]},
    ]
    rows = [{"messages": asked, "image": ["red.png", "green.png"]}]
    task = task_over(folder, rows, prompt_format="chat_messages")[0]
    assert urls_in(task.messages) == [to_url(png(RED)), to_url(png(GREEN))]
    assert [part["type"] for part in task.messages[2]["content"]] == ["text", "image_url"]
    own = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": to_url(png(BLUE))}}]}]
    task = task_over(folder, [{"messages": own}], prompt_format="chat_messages", images=[])[0]
    assert urls_in(task.messages) == [to_url(png(BLUE))]
    assert task.uid == task_over(folder, [{"messages": own}], prompt_format="chat_messages", images=[])[0].uid


def test_paths_bytes_data_urls_and_stored_features_are_the_same_task(folder):
    """The uid is of the bytes, wherever they were."""
    by_path = task_over(folder, [{"question": "Which?", "image": "red.png"}])
    renamed = folder / "other" / "name.PNG"
    renamed.parent.mkdir()
    renamed.write_bytes(png(RED))
    uids = {by_path[0].uid, task_over(folder, [{"question": "Which?", "image": "other/name.PNG"}])[0].uid}
    uids.add(task_over(folder, [{"question": "Which?", "image": to_url(png(RED))}])[0].uid)
    features = {
        "bytes": datasets.Value("binary"),
        "feature": datasets.Image(),
        "several": datasets.List(datasets.Image()),
    }
    data = {"bytes": png(RED), "feature": {"bytes": png(RED), "path": None}, "several": [{"bytes": png(RED)}]}
    for name, feature in features.items():
        file = folder / f"{name}.parquet"
        kinds = datasets.Features({"question": datasets.Value("string"), "image": feature})
        datasets.Dataset.from_list([{"question": "Which?", "image": data[name]}], features=kinds).to_parquet(file)
        taskset = make({"args": ["parquet"], "kwargs": {"data_files": str(file), "split": "train"}}, folder)
        uids.add(taskset[0].uid)
        assert urls_in(taskset[0].messages) == [to_url(png(RED))]
        assert list(taskset.list_uids()) == [(taskset[0].uid, "unknown")]
    assert len(uids) == 1
    assert task_over(folder, [{"question": "Which?", "image": "blue.png"}])[0].uid not in uids


def test_a_map_function_of_ones_own_may_give_pil_objects_and_parts(folder):
    image = pytest.importorskip("PIL.Image")

    class Own(DatasetTaskset):
        def _make_map_fn(self):
            def make_row(row, index):
                drawn = image.open(io.BytesIO(png(RED)))
                text = [{"role": "user", "content": "<image>" + row["question"]}]
                if index:
                    part = {"type": "image_url", "image_url": {"url": to_url(png(GREEN)), "detail": "low"}}
                    text, drawn = [{"role": "user", "content": [part]}], None
                images = {} if drawn is None else {"images": [drawn]}
                return {"data_source": "own", "prompt": text, "extra_info": {}, **images}

            return make_row

    (folder / "rows.jsonl").write_text('{"question": "Which?"}\n' * 2)
    source = {"args": ["json"], "kwargs": {"data_files": str(folder / "rows.jsonl"), "split": "train"}}
    taskset = Own({"loading_params": source}, cache_dir=folder.parent / "cache")
    first, second = taskset[0], taskset[1]
    assert read_header(decode_url(urls_in(first.messages)[0])) == ("png", 8, 6)
    assert second.messages[0]["content"][0]["image_url"]["detail"] == "low"
    assert [uid for uid, _ in taskset.list_uids()] == [first.uid, second.uid]


def test_an_address_stays_one_and_is_never_fetched(folder, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was fetched")

    for name in ("socket.socket.connect", "socket.create_connection", "socket.getaddrinfo"):
        monkeypatch.setattr(name, refuse)
    url = "http://127.0.0.1:9/cat.png"
    taskset = task_over(folder, [{"question": "Which?", "image": url, "answer": "1"}], ground_truth="answer")
    assert urls_in(taskset[0].messages) == [url]
    for format in ("verl", "skyrl", "trl"):
        assert urls_in(next(read_tasks(taskset.get_parquet_path(format))).messages) == [url]


@pytest.mark.parametrize(
    ("image", "template", "said"),
    [
        (["red.png", "blue.png"], "<image>{question}", "row 1: 2 images, but 1 places for them in the prompt"),
        ([], "<image>{question}", "row 1: 0 images, but 1 places"),
        ("gone.png", "{question}", "row 1: the image cannot be used: .*gone.png: No such file"),
        (["red.png", "empty.png"], "{question}", "row 1: image 1 of 2 cannot be used: 0 bytes"),
        ("cut.png", "{question}", "row 1: the image cannot be used: a PNG that is cut off after 50 bytes"),
        ("page.png", "{question}", "HTML, not PNG, JPEG, WebP or GIF"),
        ("drawing.svg", "{question}", "row 1: .*drawing.svg does not end in .png"),
        ("huge.png", "{question}", "row 1: the image cannot be used: 100,000,000 bytes, more than 20,971,520"),
        ("../secret.png", "{question}", "row 1: the path '../secret.png' leads out of"),
        ("link.png", "{question}", "row 1: the path 'link.png' leads out of"),
        ("file:///etc/passwd", "{question}", "neither a file here nor http"),
        ("/etc/passwd", "{question}", "row 1: the path '/etc/passwd' leads out of"),
        ("data:image/png;base64,xx", "{question}", "row 1: .*base64 is damaged"),
        ("data:text/html;base64,PGh0bWw+", "{question}", "row 1: .*HTML"),
        ("iVBORw0KGgo" * 30, "{question}", "row 1: .*looks like base64: write data:image/png;base64, before it"),
        ("", "{question}", "row 1: the image cannot be used: its path is empty"),
        ("a picture of " * 40 + ".png", "{question}", "row 1: the image cannot be used: .*File name too long"),
        ("iVBORw0_-go" * 30, "{question}", "row 1: the image cannot be used: .*"),
    ],
)
def test_what_is_wrong_with_an_image_names_its_row(folder, image, template, said):
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes(png(RED)[:50])
    (folder / "page.png").write_bytes(b"<html>no</html>")
    (folder / "drawing.svg").write_bytes(b"<svg/>")
    (folder.parent / "secret.png").write_bytes(png(RED))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    with (folder / "huge.png").open("wb") as file:
        file.write(png(RED))
        file.truncate(100_000_000)
    several = isinstance(image, list)
    first = ["red.png"] if several else "red.png"
    taskset = task_over(
        folder,
        [{"question": "Which?", "image": first}, {"question": "Which?", "image": image}],
        prompt_template=template,
    )
    with pytest.raises(TreetuneError, match=said) as raised:
        taskset.get_parquet_path()
    assert len(str(raised.value)) < 600
    assert ("write <image> where each image goes" in str(raised.value)) == ("places" in said)


def test_a_place_for_an_image_that_no_column_has_is_told(folder):
    taskset = task_over(folder, [{"question": "Which?"}], images=[], prompt_template="<image>{question}")
    with pytest.warns(UserWarning, match="1 row with <image> in the prompt and no image; .*images names no column"):
        taskset.count()


def test_a_folder_that_is_named_may_be_anywhere(folder):
    elsewhere = folder.parent / "pictures"
    elsewhere.mkdir()
    (elsewhere / "cat.png").write_bytes(png(RED))
    for name in ("cat.png", str(elsewhere / "cat.png")):
        rows = [{"question": "Which?", "image": name}]
        assert parts_of(task_over(folder, rows, image_folder=str(elsewhere))) == ["red", "Which?"]
    with raises_code("taskset", "'../data/red.png'", "image_folder"):
        task_over(folder, [{"question": "?", "image": "../data/red.png"}], image_folder=str(elsewhere))[0]


def test_rows_without_an_image_are_left_out_and_counted(folder):
    rows = [{"question": "Which?", "image": "red.png"}, {"question": "Which?", "image": None}]
    sidecar, _, _ = task_over(folder, rows).build()
    assert (sidecar.rows, sidecar.dropped) == (1, {"no image": 1})
    with raises_code("taskset", "row 1"):
        task_over(folder, rows, drop_missing=False).build()


def test_faults_of_the_config_are_told_together(folder):
    config = {"images": ["imge"], "max_prompt_length": 10, "tokenizer": "x"}
    with pytest.raises(ConfigError) as raised:
        task_over(folder, [{"question": "?", "image": "red.png"}], **config).check_source()
    said = str(raised.value)
    assert "no column 'imge'; did you mean 'image'?" in said
    assert "counts only text, not images" in said


def test_a_changed_image_is_built_anew_and_a_run_beside_it_changes_nothing(folder):
    taskset = task_over(folder, [{"question": "Which?", "image": "red.png"}])
    before = taskset.cache_key()
    run = folder / "runs" / "one"
    (run / "images").mkdir(parents=True)
    (run / "fingerprint.json").write_text("{}")
    (run / "images" / "abc.png").write_bytes(png(RED))
    assert taskset.cache_key() == before
    assert [Path(name).name for name, _, _ in describe_files(taskset.config)] == ["blue.png", "green.png", "red.png"]
    (folder / "red.png").write_bytes(png(BLUE, 9, 9))
    assert taskset.cache_key() != before
    assert read_header(decode_url(urls_in(taskset[0].messages)[0])).width == 9


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_larger_images_are_made_smaller_where_that_is_asked_for(folder, format):
    image = pytest.importorskip("PIL.Image")
    suffix = {"JPEG": "jpg"}.get(format, format.lower())
    image.effect_noise((200, 100), 80).save(folder / f"noise.{suffix}", format)
    rows = [{"question": "?", "image": f"noise.{suffix}"}, {"question": "?", "image": "red.png"}]
    taskset = task_over(folder, rows, max_pixels=5000)
    header = read_header(decode_url(urls_in(taskset[0].messages)[0]))
    assert header == ("png" if format == "GIF" else format.lower(), 100, 50)
    assert urls_in(taskset[1].messages) == [to_url(png(RED))]


def test_without_pillow_only_making_smaller_is_refused(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    rows = [{"question": "Which?", "image": "red.png"}]
    assert parts_of(task_over(folder, rows)) == ["red", "Which?"]
    with raises_code("missing-extra", "images"):
        task_over(folder, rows, max_pixels=4)[0]


def test_many_images_are_written_and_read_a_few_at_a_time(folder, monkeypatch):
    path = task_over(folder, [{"question": f"{n}?", "image": "red.png"} for n in range(70)]).get_parquet_path()
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [32, 32, 6]
    size = sum(metadata.row_group(n).total_byte_size for n in range(3)) // 70
    monkeypatch.setattr("treetune.data.sources.files.TOGETHER_BYTES", 10 * size)
    with pq.ParquetFile(path) as file:
        assert rows_within(file, 2000) == 10
    assert len(list(read_tasks(path))) == 70


@pytest.mark.thorough
def test_other_processes_build_the_same_rows(folder):
    rows = [{"question": f"Which, {n}?", "image": list(COLOURS)[n % 3] + ".png"} for n in range(40)]
    alone, helped = (task_over(folder, rows, num_proc=count, data_source=f"d{count}") for count in (1, 2))
    assert [uid for uid, _ in alone.list_uids()] == [uid for uid, _ in helped.list_uids()]
