"""Files as modules: each imports what lies in its own folder, and other processes find the same."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from named_code import load_file, load_object
from raising import raises_code

from treetune.config import code_files
from treetune.data.rows import read_rows

LATE = """
from treetune import Task, Taskset

class Mine(Taskset):
    def load_tasks(self):
        {statement}
        return [Task(prompt={value})]
"""


def run_beside_support(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "support")}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)


def write(folder: Path, **texts: str) -> Path:
    """Files by their names, `pkg_sub` for `pkg/sub.py` and `pkg_init` for its `__init__.py`; gives the first."""
    paths = [folder / f"{name.replace('_', '/').replace('init', '__init__')}.py" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return paths[0]


@pytest.fixture(autouse=True)
def python_path():
    """Files leave their folders in `sys.path`."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("import utils", "utils.WORD"),
        ("import utils as u", "u.WORD"),
        ("from utils import WORD as word", "word"),
        ("import parts.deep", "parts.deep.word() + ' ' + parts.WORD"),
        ("import parts.deep as deep", "deep.word()"),
        ("from parts.deep import word", "word()"),
        ("from parts import deep", "deep.word()"),
        ("from plain.deep import WORD", "WORD"),
        ("from . import utils", "utils.WORD"),
        ("from .parts import WORD", "WORD"),
        ("import json, utils, parts.deep as deep", "utils.WORD + ' ' + deep.word()"),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_each_file_imports_its_own_neighbours(tmp_path, statement, value, late):
    text = LATE.format(statement=statement, value=value)
    if not late:
        text = statement + "\n" + LATE.format(statement="", value=value)
    files_by_name = {
        name: write(
            tmp_path / name,
            task=text,
            utils=f"WORD = {name!r}",
            parts_init=f"WORD = {name!r}",
            parts_deep="def word():\n    from . import other\n    import parts.other, utils\n    return utils.WORD",
            parts_other="import utils",
            plain_deep=f"WORD = {name!r}",
        )
        for name in ("first", "second")
    }
    classes = {name: load_object(f"{file}:Mine") for name, file in files_by_name.items()}
    for name, cls in classes.items():
        assert set(cls().select_tasks()[0].prompt.split()) == {name}


def test_a_class_of_a_neighbour_travels_to_a_process_that_has_loaded_another_of_its_name(tmp_path):
    kinds = "class Kind:\n    where = {!r}\n"
    for name in ("first", "second"):
        write(
            tmp_path / name,
            task="from utils import Kind\nfrom parts.deep import Part\n",
            utils=kinds.format(name),
            parts_init="",
            parts_deep=f"from utils import Kind\nclass Part(Kind):\n    where = {name!r}\n",
        )
    first, second = (load_file(tmp_path / name / "task.py") for name in ("first", "second"))
    assert first.Kind is not second.Kind
    (tmp_path / "pickled").write_bytes(pickle.dumps([second.Kind(), second.Part(), first.Kind()]))
    code = (
        "import pickle, sys\nfrom named_code import load_file\nload_file(sys.argv[1])\n"
        "print([one.where for one in pickle.load(open(sys.argv[2], 'rb'))])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "first/task.py"), str(tmp_path / "pickled")]
    done = run_beside_support(command)
    assert done.stdout == "['second', 'second', 'first']\n", done.stderr


def test_a_class_of_a_package_beside_is_known_by_its_file(tmp_path):
    """Rows name a class by its file; the file is part of a package that imports itself both ways."""
    file = write(
        tmp_path,
        task="from parts.deep import Part",
        parts_init="",
        parts_deep="import parts.other\nfrom . import other\nassert other is parts.other\nclass Part: word = 'w'",
        parts_other="WORD = 'w'",
    )
    cls = load_file(file).Part
    assert code_files.source_of(cls) == tmp_path / "parts/deep.py"
    code = "import sys\nfrom named_code import load_object\nprint(load_object(sys.argv[1]).word)"
    command = [sys.executable, "-c", code, f"{code_files.source_of(cls)}:Part"]
    assert run_beside_support(command).stdout == "w\n"


def test_what_the_program_itself_imported_is_not_loaded_twice(tmp_path, monkeypatch):
    file = write(tmp_path, task="import kindred\nfrom partly import deep", kindred="class Kind: pass",
                 partly_init="", partly_deep="")  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    import kindred  # type: ignore[import-not-found]

    module = load_file(file)
    assert module.kindred is kindred
    assert module.deep.__name__ == "partly.deep"  # found by Python, before our own folders


def test_neighbours_that_import_each_other(tmp_path):
    file = write(
        tmp_path,
        one="import two\nfrom three import Base\nclass Mine(Base):\n    other = two.name\n",
        two="import one\ndef name(self):\n    return one.Mine.__name__\n",
        three="class Base: pass\n",
    )
    module = load_file(file)
    assert module.Mine().other() == "Mine"
    assert load_file(tmp_path / "two.py").one is module


def test_threads_that_import_late_get_one_module(tmp_path):
    file = write(
        tmp_path, task="def get():\n    import slow\n    return slow", slow="import time; time.sleep(0.2); DONE = 1"
    )
    get, found = load_file(file).get, []
    threads = [threading.Thread(target=lambda: found.append(get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert {id(module) for module in found} == {id(get())}
    assert get().DONE


def test_a_neighbour_wins_over_a_library_for_its_file_alone(tmp_path):
    file = write(
        tmp_path / "mine", task="import json, csv\nfrom calendar import WORD", json="WORD = 'mine'", calendar="WORD = 1"
    )
    other = write(tmp_path / "other", task="import json")
    assert load_file(file).json.WORD == "mine"
    assert load_file(file).csv.__name__ == "csv"
    assert load_file(other).json.dumps(1) == "1"


def test_a_file_with_the_name_of_a_library_imports_the_library(tmp_path):
    file = write(tmp_path, calendar="import calendar\nWORD = calendar.month_name[1]")
    assert load_file(file).WORD == "January"


def test_a_folder_of_data_does_not_hide_a_library(tmp_path):
    (tmp_path / "msgspec").mkdir()
    (tmp_path / "msgspec" / "rows.jsonl").touch()
    assert load_file(write(tmp_path, task="import msgspec")).msgspec.json.decode(b"1") == 1


def test_a_missing_neighbour_has_its_own_name_in_the_error(tmp_path):
    file = write(tmp_path, task="from utils import absent", utils="")
    with raises_code("code-not-loaded", "'absent'", "'utils'"):
        load_file(file)
    file = write(tmp_path, other="from parts.absent import x", parts_init="")
    with raises_code("code-not-loaded", "'parts.absent'"):
        load_file(file)


def test_errors_stand_on_the_line_of_the_source(tmp_path):
    file = write(tmp_path, task="import utils, \\\n    json\n\ndef fail():\n    1 / 0\n", utils="")
    with pytest.raises(ZeroDivisionError) as caught:
        load_file(file).fail()
    assert caught.traceback[-1].lineno == 4
    assert caught.traceback[-1].path == file


def test_a_change_of_a_neighbour_of_a_neighbour_changes_the_hash(tmp_path):
    file = write(tmp_path, task="import one", one="from parts.deep import x", parts_init="",
                 parts_deep="from . import side\nx = 1", parts_side="y = 1")  # fmt: skip
    before = code_files.hash_files([file])
    (tmp_path / "parts/side.py").write_text("y = 2")
    assert code_files.hash_files([file]) != before


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.quick_cases(1)
def test_dataset_tasks_of_one_list_import_their_own_neighbours_in_row_functions(tmp_path, treetune, num_proc):
    rows = (
        "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n    def _make_map_fn(self):\n"
        "        make = super()._make_map_fn()\n        def fn(row, index):\n            import utils\n"
        "            return {**make(row, index), 'reward_model': {'ground_truth': utils.WORD}}\n        return fn\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    nodes = []
    for name in ("A", "B"):
        write(tmp_path / name, task=rows, utils=f"WORD = {name!r}")
        loading = {"args": ["json"], "kwargs": {"data_files": "rows.jsonl", "split": "train"}}
        nodes.append({"custom_cls": {"path": f"{name}/task.py"}, "loading_params": loading, "num_proc": num_proc})
    (tmp_path / "tasks.yaml").write_text(json.dumps({"train_tasks": nodes}))
    built = treetune("build", "tasks.yaml", "--json", TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"))
    assert built.code == 0, built.err
    truths = [[row["reward_model"]["ground_truth"] for row in read_rows(path)] for path in built.json["train_files"]]
    assert truths == [["A", "A"], ["B", "B"]]
