"""Local files are read as they stand, by the keywords of `load_dataset`: nothing in them becomes something else."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from raising import raises_code

import datasets
from treetune.data.datasets.task_lists import load_task
from treetune.data.sources.loading import LibraryDataset, open_source
from treetune.data.sources.loading_params import LoadingParams, find_local_files
from treetune.data.sources.local_files import LocalFiles
from treetune.errors import UsageError


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


def rows_of(*args, **kwargs):
    """The rows of a source that is read here, not by the library."""
    opened = open_source(LoadingParams(args=list(args), kwargs=kwargs))
    assert isinstance(opened, LocalFiles)
    rows = [row for batch in opened.batches() for row in (batch if isinstance(batch, list) else batch.to_pylist())]
    assert opened.rows == len(rows)
    return rows


def task(kind, file, template, **keys):
    loading = {"args": [kind], "kwargs": {"data_files": file, "split": "train", **keys.pop("kwargs", {})}}
    return load_task({"loading_params": loading, "prompt_template": template, **keys})


# What stands in the file


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["2024-01-01", "2024-02-29"], ["2024-01-01", "2024-02-29"]),
        (["2024-01-01T00:00:00Z", "2024-01-01 10:00"], ["2024-01-01T00:00:00Z", "2024-01-01 10:00"]),
        ([2**70, 5], [str(2**70), "5"]),
        ([-(2**63) - 1, 1], [str(-(2**63) - 1), "1"]),
        ([5, None, 7], ["5", "7"]),
        ([5, 2.5], ["5", "2.5"]),
        (["007", "true"], ["007", "true"]),
        ([1, "1", True], ["1", "1", "True"]),
        (["null", "NaN"], ["null", "NaN"]),
    ],
    ids=str,
)
def test_json_is_trained_on_as_it_stands(tmp_path, name, values, shown):
    rows = [{"q": "what", "v": value} for value in values]
    text = json.dumps(rows) if name == "rows.json" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(text)
    made = task("json", name, "{q} {v}", ground_truth="v", extra_fields=["v"])
    assert [one.prompt[-1]["content"] for one in made] == [f"what {value}" for value in shown]
    assert [one.ground_truth for one in made] == shown
    kept = [(type(one.extra_info["v"]) in (int, float), one.extra_info["v"]) for one in made]
    assert kept == [(type(value) in (int, float), value) for value in values if value is not None]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["5", "", "7"], [5, None, 7]),
        (["007", "5"], ["007", "5"]),
        (["-5", "0"], [-5, 0]),
        (["+5", "-0"], ["+5", "-0"]),
        (["1.5", "0.25"], [1.5, 0.25]),
        (["1.50", "2"], ["1.50", "2"]),
        (["5", "2.5"], ["5", "2.5"]),
        (["1e5"], ["1e5"]),
        (["nan", "inf"], ["nan", "inf"]),
        ([str(2**63 - 1)], [2**63 - 1]),
        ([str(2**70), "1"], [str(2**70), "1"]),
        (["True", "False", ""], [True, False, None]),
        (["true", "false"], ["true", "false"]),
        (["2024-01-01"], ["2024-01-01"]),
        (["null", "NA", "None"], ["null", "NA", "None"]),
        ([" 5", "6"], [" 5", "6"]),
        (["\u0663", "1_000"], ["\u0663", "1_000"]),
    ],
    ids=str,
)
def test_a_column_of_csv_is_typed_only_where_every_cell_prints_back(tmp_path, cells, values):
    (tmp_path / "a.csv").write_text("".join(f"{q},{v}\n" for q, v in [("q", "v"), *(("what", cell) for cell in cells)]))
    found = [row["v"] for row in rows_of("csv", data_files="a.csv", split="train")]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in values]
    for cell, value in zip(cells, found, strict=True):
        assert cell == ("" if value is None else str(value))


def test_a_type_of_csv_is_that_of_all_its_files(tmp_path):
    (tmp_path / "a.csv").write_text("q,v\na,5\n")
    (tmp_path / "b.csv").write_text("v,q\n007,b\n")
    rows = rows_of("csv", data_files=["a.csv", "b.csv"])
    assert [(row["q"], row["v"]) for row in rows] == [("a", "5"), ("b", "007")]


def test_numbers_of_a_text_column_are_formatted_as_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("q,p\na,1.50\nb,2\n")
    made = task("csv", "a.csv", "{q}: {p:.2f} {p}", ground_truth="p")
    assert [one.prompt[0]["content"] for one in made] == ["a: 1.50 1.50", "b: 2.00 2"]
    (tmp_path / "b.csv").write_text("q,p\na,1.50\nb,many\n")
    with raises_code("taskset", "row 1", "prompt_template"):
        task("csv", "b.csv", "{p:.2f}").count()


def test_a_row_has_every_column_and_mappings_only_what_they_have(tmp_path):
    given = [{"q": "a", "m": {"x": 1}}] * 12_000 + [{"m": {"y": None}, "late": [1, "two"]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    rows = rows_of("json", data_files="a.jsonl")
    assert rows[0] == {"q": "a", "m": {"x": 1}, "late": None}
    assert rows[-1] == {"q": None, "m": {"y": None}, "late": [1, "two"]}


def test_booleans_beside_fractions_stay_booleans(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "a", "v": 1.5}\n{"q": "b", "v": true}\n')
    assert [one.extra_info["v"] for one in task("json", "a.jsonl", "{q}", extra_fields=["v"])] == [1.5, True]
    assert task("json", "a.jsonl", "{q}", extra_fields=["v"])[1].extra_info["v"] is True


@pytest.mark.parametrize(
    "text",
    [
        '{"q": "a"}\n\n  \n{"q": "b"}',
        '\ufeff{"q": "a"}\r\n{"q": "b"}\r\n',
        '[{"q": "a"},\n {"q": "b"}]',
        '{"q": "a", "x": NaN}\n{"q": "b", "x": 1e999}\n',
    ],
    ids=["blank lines", "a mark and CRLF", "a list", "NaN"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz"])
def test_json_may_be_lines_or_a_list_whatever_the_file_is_called(tmp_path, name, text):
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [row["q"] for row in rows_of("json", data_files=name)] == ["a", "b"]


@pytest.mark.parametrize("text", ['{"q": 1}{"q": 2}\n', '{"q":\n1}\n', '{"q": 1}\n[2]\n', '{"q": 1}\n{"q": 2\n'])
def test_what_is_no_object_on_a_line_is_refused_by_its_line(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with raises_code("unreadable", "a.jsonl, line"):
        rows_of("json", data_files="a.jsonl")


# The keywords of load_dataset

FILES = {
    "train.jsonl": "".join(json.dumps({"q": f"q{n}", "n": n}) + "\n" for n in range(250)),
    "test.jsonl": "".join(json.dumps({"q": f"t{n}", "n": n}) + "\n" for n in range(30)),
    "one.json": json.dumps({"data": [{"q": "a"}, {"q": "b"}], "columns": {"q": ["c", "d"]}, "texts": ["e", "f"]}),
    "texts.json": '["e", "f"]',
    "a.csv": "q,n\na,1\nb,2\n",
    "b.csv": "q;n\n'a;b';1\nb;2\n",
    "index.csv": ",q\n0,a\n1,b\n",
    "latin.csv": "q,n\ncaf\xe9,1\n",
    "sub/x.jsonl": '{"q": "x", "n": 1}\n',
    "sub/deep/y.jsonl": '{"q": "y", "n": 2}\n',
    "sub/README.md": "no rows",
    "sub/.hidden.jsonl": "no rows",
}


@pytest.fixture
def files(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(text.encode("latin-1" if name == "latin.csv" else "utf-8"))
    pq.write_table(pa.table({"q": ["a", "b"], "n": [1, None]}), tmp_path / "a.parquet")
    return tmp_path


BOTH = {"train": "train.jsonl", "test": "test.jsonl"}
SPLITS = [
    "train", "test", "train[:10]", "train[-7:]", "train[10:20]", "train[:10%]", "train[-33%:]", "train[3%:7%]", "all",
    "train[:50%]+test", "test+train[200:]", "train[:7%](pct1_dropremainder)", "train[240:1000]", "train[:-200]",
]  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_means_the_rows_that_it_means_to_the_library(files, split):
    expected = datasets.load_dataset("json", data_files=BOTH, split=split)
    assert rows_of("json", data_files=BOTH, split=split) == expected.to_list()


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("json", {"data_files": ["test.jsonl", "train.jsonl"]}),
        ("json", {"data_files": "t*.jsonl"}),
        ("json", {"data_files": "sub/**/*.jsonl"}),
        ("json", {"data_files": "sub/*"}),
        ("json", {"data_files": "x.jsonl", "data_dir": "sub"}),
        ("json", {"data_files": [{"split": "test", "path": "test.jsonl"}]}),
        ("json", {"data_files": "train.jsonl", "streaming": True}),
        ("json", {"data_files": "one.json", "field": "data"}),
        ("json", {"data_files": "one.json", "field": "columns"}),
        ("json", {"data_files": "texts.json"}),
        ("csv", {"data_files": "a.csv"}),
        ("csv", {"data_files": "b.csv", "sep": ";", "quotechar": "'"}),
        ("csv", {"data_files": "b.csv", "delimiter": ";", "quotechar": "'"}),
        ("csv", {"data_files": "a.csv", "names": ["x", "y"], "header": 0}),
        ("csv", {"data_files": "a.csv", "column_names": ["x", "y"]}),
        ("csv", {"data_files": "a.csv", "header": None}),
        ("csv", {"data_files": "index.csv"}),
        ("csv", {"data_files": "latin.csv", "encoding": "latin-1"}),
        ("parquet", {"data_files": "a.parquet"}),
        ("parquet", {"data_files": "a.parquet", "columns": ["n"]}),
    ],
    ids=str,
)
def test_a_keyword_means_what_it_means_to_the_library(files, kind, kwargs):
    split = "test" if isinstance(kwargs["data_files"][0], dict) else "train"
    expected = list(datasets.load_dataset(kind, split=split, **kwargs))
    found = rows_of(kind, split=split, **kwargs)
    if kwargs.get("column_names") or ("header" in kwargs and kwargs["header"] is None):
        expected = [{key: str(value) for key, value in row.items()} for row in expected]
    assert found == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "files_read"),
    [
        (["{}"], {"split": "train"}, ["train.jsonl"]),
        (["{}"], {"split": "test"}, ["test.jsonl"]),
        (["{}"], {"data_files": "train.jsonl", "split": "train"}, ["train.jsonl"]),
        (["json"], {"data_dir": "{}", "split": "test"}, ["test.jsonl"]),
    ],
    ids=str,
)
def test_a_folder_has_the_splits_that_the_library_sees(tmp_path, args, kwargs, files_read):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(json.dumps({"q": name, "day": "2024-01-01"}) + "\n")
    here = {key: str(value).replace("{}", str(folder)) for key, value in kwargs.items()}
    rows = rows_of(*(arg.replace("{}", str(folder)) for arg in args), **here)
    assert rows == [{"q": name, "day": "2024-01-01"} for name in files_read]


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("csv", {"data_files": "a.csv", "skiprows": 1}),
        ("csv", {"data_files": "a.csv", "sep": r"\s+"}),
        ("json", {"data_files": "train.jsonl", "encoding_errors": "ignore"}),
        ("parquet", {"data_files": "a.parquet", "filters": [["n", "==", 1]]}),
        ("text", {"data_files": "a.csv"}),
    ],
    ids=str,
)
def test_any_other_keyword_goes_to_the_library(files, kind, kwargs):
    params = LoadingParams(args=[kind], kwargs={**kwargs, "split": "train"})
    assert find_local_files(params) is None
    assert isinstance(open_source(params), LibraryDataset)


def test_a_split_that_is_none_says_which_there_are(files):
    with raises_code("usage", "'dev'", "train, test"):
        rows_of("json", data_files=BOTH, split="dev")
    with pytest.raises(UsageError, match="is not a split"):
        rows_of("json", data_files=BOTH, split="train[5]")
    with raises_code("usage", "loading_params.kwargs.split", "train, test"):
        rows_of("json", data_files=BOTH)


# What only the library reads


@pytest.mark.parametrize(
    ("name", "text", "keyword", "said"),
    [
        (
            "a.jsonl",
            '{"q": "a", "v": "2024-01-01"}\n{"q": "b", "v": "2024-01-02"}\n',
            {"encoding_errors": "ignore"},
            "2 rows whose v differs from the file; row 0: '2024-01-01' in the file, read as timestamp[s]; "
            "leave encoding_errors out of loading_params.kwargs to keep the values unchanged",
        ),
        (
            "a.jsonl",
            '{"q": "a", "v": 1}\n{"q": "b", "v": 2.5}\n',
            {"encoding_errors": "ignore"},
            "row 0: 1 in the file",
        ),
        ("a.csv", "q,v\na,5\nb,\n", {"skipinitialspace": True}, "row 0: 5 in the file, read as double"),
        ("a.csv", "q,v\na,007\n", {"skipinitialspace": True}, "row 0: '007' in the file, read as int64"),
        ("a.csv", "q,v\na,x\nb,null\n", {"skipinitialspace": True}, "row 1: 'null' in the file, read as nothing"),
        ("a.csv", "q,v\na,x\nb,y\n", {"skipinitialspace": True}, None),
        ("a.csv", "q,v,unused\na,x,007\n", {"skipinitialspace": True}, None),
    ],
)
def test_what_the_library_changes_is_said_with_its_column(tmp_path, name, text, keyword, said, treetune):
    (tmp_path / name).write_text(text)
    made = task("csv" if name == "a.csv" else "json", name, "{q}", extra_fields=["v"], kwargs=keyword)
    flaws = [str(flaw) for flaw in made.find_flaws()]
    assert bool(flaws) == (said is not None)
    assert all(said in flaw for flaw in flaws)
    loading = {"args": made.config.loading_params.args, "kwargs": made.config.loading_params.kwargs}
    entry = {"loading_params": loading, "prompt_template": "{q}", "extra_fields": ["v"], "ground_truth": "q"}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"train_tasks": [entry]}))
    report = json.loads(treetune("validate", "tasks.yaml", "--json").out)
    assert ("values-changed" in {finding["rule"] for finding in report["findings"]}) == (said is not None)


# What a build does with it


def test_a_build_of_local_files_does_not_load_the_library(files, treetune_process):
    entry = {
        "loading_params": {"args": ["csv"], "kwargs": {"data_files": "a.csv", "split": "train"}},
        "prompt_template": "{q}",
        "ground_truth": "n",
    }
    (files / "tasks.yaml").write_text(yaml.safe_dump({"train_tasks": [entry]}))
    (files / "site").mkdir()
    (files / "site" / "datasets.py").write_text("raise ImportError('the library was loaded')\n")
    path = os.pathsep.join([str(files / "site"), os.environ.get("PYTHONPATH", "")])
    assert treetune_process("build", "tasks.yaml", PYTHONPATH=path).code == 0


def test_parquet_keeps_its_types_and_marked_json_is_decoded(tmp_path):
    from treetune.data.rows.growing_parquet import GrowingParquet
    from treetune.data.rows.parquet import table_of

    with GrowingParquet(tmp_path / "a.parquet", exact=True) as writer:
        writer.write(table_of([{"q": "a", "v": 1}, {"q": "b", "v": "two"}, {"q": "c", "v": 2**70}]))
    made = task("parquet", "a.parquet", "{q} {v}", ground_truth="v")
    assert [one.ground_truth for one in made] == ["1", "two", str(2**70)]
