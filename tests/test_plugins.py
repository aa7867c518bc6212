"""Classes from files: one class per file, picklable, siblings importable, source known."""

from __future__ import annotations

import ast
import gc
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from named_code import load_object
from raising import raises_code

from treetune import ShuffleConfig, Task, Taskset, TasksetConfig, build_taskset, load_taskset
from treetune.config.code_files import with_imports
from treetune.config.structs import field_docs
from treetune.core.fingerprint import taskset_fingerprint
from treetune.errors import ConfigError

TASKSET = """
from treetune import Task, Taskset
from {sibling} import WORD

class Mine(Taskset):
    def load_tasks(self):
        return [Task(prompt=WORD, extra_info={{"key": self.config.get("answer_key")}})]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "its_sibling.py").write_text("WORD = 'from the sibling'\n")
    (tmp_path / "mine.py").write_text(TASKSET.format(sibling="its_sibling"))
    yield tmp_path / "mine.py"
    sys.modules.pop("its_sibling", None)


def test_two_loads_give_one_class(file, monkeypatch):
    one = load_object(f"{file}:Mine")
    monkeypatch.chdir(file.parent)
    assert load_object("mine.py:Mine") is one
    assert load_object(f"{file.parent}/../{file.parent.name}/mine.py:Mine") is one


def test_its_source_is_known(file):
    assert inspect.getsourcefile(load_object(f"{file}:Mine")) == str(file)


def test_an_instance_travels_to_a_process_that_never_heard_of_the_file(file, tmp_path):
    pickled = tmp_path / "instance.pickle"
    pickled.write_bytes(pickle.dumps(build_taskset({"id": f"{file}:Mine"})))
    code = f"import pickle; print(pickle.load(open({str(pickled)!r}, 'rb')).select_tasks()[0].prompt)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "from the sibling\n"


def test_two_files_of_the_same_name_are_two_modules(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"class Here: where = {name!r}\n")
    assert load_object(f"{tmp_path}/one/same.py:Here").where == "one"
    assert load_object(f"{tmp_path}/two/same.py:Here").where == "two"


@pytest.mark.parametrize(
    ("content", "spec", "fact"),
    [
        ("x = 1", "absent.py:Name", "absent.py"),
        ("class Colours: pass", "mine.py:Colors", "'Colours'"),
        ("def broken(:", "mine.py:Name", "SyntaxError"),
        ("import nowhere_to_be_found", "mine.py:Name", "nowhere_to_be_found"),
        ("1 / 0", "mine.py:Name", "ZeroDivisionError"),
        ("", "no_such_module_at_all:Name", "no_such_module_at_all"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path, monkeypatch, content, spec, fact):
    (tmp_path / "mine.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    with raises_code("code-not-loaded", fact):
        load_object(spec)


def test_custom_cls_without_a_config_type_takes_any_key_into_its_fingerprint(file):
    def build(**keys):
        return build_taskset({"custom_cls": {"path": str(file), "name": "Mine"}, **keys})

    taskset = build(answer_key="answer", shuffle={"seed": 3})
    assert taskset.select_tasks()[0].extra_info == {"key": "answer"}
    assert taskset.config["answer_key"] == taskset.config.answer_key == "answer"
    assert taskset.config.shuffle.seed == 3
    assert taskset_fingerprint(taskset) != taskset_fingerprint(build(answer_key="other"))


def test_custom_cls_with_a_config_type_checks_its_keys(tmp_path):
    (tmp_path / "typed.py").write_text(
        "from treetune import Task, Taskset, TasksetConfig\n"
        "class Config(TasksetConfig, frozen=True):\n    size: int = 1\n"
        "class Mine(Taskset[Task, Config]):\n    def load_tasks(self): return [Task(prompt='x')] * self.config.size\n"
    )
    custom = {"path": str(tmp_path / "typed.py"), "name": "Mine"}
    assert len(build_taskset({"custom_cls": custom, "size": 3}).select_tasks()) == 3
    with raises_code("unknown-key", "'size'"):
        build_taskset({"custom_cls": custom, "sise": 3})


def test_open_keys_end_where_a_typed_config_is_inherited(tmp_path):
    (tmp_path / "sub.py").write_text(
        "from treetune.tasksets.arithmetic import Arithmetic\nclass Mine(Arithmetic): pass\n"
    )
    custom = {"path": str(tmp_path / "sub.py"), "name": "Mine"}
    assert build_taskset({"custom_cls": custom, "level": 3}).config.level == 3
    with raises_code("unknown-key", "'level'"):
        build_taskset({"custom_cls": custom, "levl": 3})


def test_further_keys_cannot_be_smuggled_in(file):
    for node in ({"id": "arithmetic"}, {"custom_cls": {"path": str(file), "name": "Mine"}}):
        with raises_code("config", "taskset.extra"):
            build_taskset({**node, "extra": {"levl": 3}})


@pytest.mark.parametrize("custom", [{"path": 5}, {"path": "x.py", "name": 5}, {"path": "x.py", "nmae": "x"}, 5])
def test_a_custom_cls_that_makes_no_sense_is_told(custom):
    with pytest.raises(ConfigError, match="custom_cls"):
        build_taskset({"custom_cls": custom})


def test_a_sibling_is_imported_as_in_a_script(tmp_path):
    (tmp_path / "calendar.py").write_text("WORD = 'mine, not the standard library'\n")
    (tmp_path / "mine.py").write_text(TASKSET.format(sibling="calendar"))
    code = (
        "import sys; sys.modules.pop('calendar', None)\nfrom treetune import load_taskset\n"
        f"print(load_taskset({str(tmp_path / 'mine.py')!r} + ':Mine')[0].prompt)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mine, not the standard library\n"


def test_a_blocked_module_is_no_hindrance(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert load_object(f"{file}:Mine").__name__ == "Mine"


def test_a_file_name_beyond_ascii_works_in_any_locale(tmp_path):
    (tmp_path / "ünï.py").write_text("class Here: pass\n")
    code = "import sys; sys.path.insert(0, sys.argv[2]); from named_code import load_object; "
    code += "print(load_object(sys.argv[1]).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code, f"{tmp_path}/ünï.py:Here", Path(__file__).with_name("support")],
        capture_output=True, text=True, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert done.stdout == "Here\n", done.stderr


def test_custom_cls_name_defaults_to_task(tmp_path):
    (tmp_path / "plain.py").write_text(
        "import treetune\nclass Task(treetune.Taskset):\n    def load_tasks(self): return [treetune.Task(prompt='x')]\n"
    )
    assert build_taskset({"custom_cls": {"path": str(tmp_path / "plain.py")}}).select_tasks()[0].prompt == "x"
    with raises_code("usage", "custom_cls.name"):
        build_taskset({"custom_cls": {"path": str(tmp_path / "plain.py"), "name": "Absent"}})


def test_what_a_file_imports_from_beside_it_belongs_to_it(tmp_path):
    (tmp_path / "parts" / "inner").mkdir(parents=True)
    texts = {
        "main.py": "import json, numpy\nfrom first import x\nfrom parts.inner import deep\ndef f():\n    import late\n",
        "first.py": "import main, second\n",
        "second.py": "x = (\n",
        "late.py": "",
        "unused.py": "",
        "parts/__init__.py": "",
        "parts/side.py": "",
        "parts/inner/__init__.py": "",
        "parts/inner/deep.py": "from .. import side\nimport parts.other\n",
        "parts/other.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = {str(path.relative_to(tmp_path)) for path in with_imports(tmp_path / "main.py")}
    assert found == set(texts) - {"unused.py"}


def test_a_parser_that_another_thread_confuses_is_asked_again(tmp_path, monkeypatch):
    """Python 3.11 says SystemError where a traceback is printed meanwhile."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "main.py").write_text("import beside")
    parse, calls = ast.parse, []

    def confused(source):
        calls.append(source)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch")
        return parse(source)

    monkeypatch.setattr(ast, "parse", confused)
    assert [file.name for file in with_imports(tmp_path / "main.py")] == ["main.py", "beside.py"]


def test_keys_that_a_config_declares_as_files_or_code_are_found_beside_the_yaml(tmp_path, monkeypatch):
    (tmp_path / "words.py").write_text(
        "from treetune import Task, Taskset, TasksetConfig\n"
        "from treetune.config.structs import CodeName, FileName\n"
        "class Config(TasksetConfig, frozen=True, kw_only=True):\n"
        "    lists: list[FileName] = []\n    keep: CodeName | None = None\n    plain: str = ''\n"
        "class Words(Taskset[Task, Config]):\n    def load_tasks(self): return [Task(prompt='a')]\n"
    )
    (tmp_path / "a.txt").touch()
    (tmp_path / "rule.py").write_text("def keep(row): return True\n")
    (tmp_path / "config.yaml").write_text(
        "taskset: {id: 'words.py:Words', lists: [a.txt, nowhere.txt], keep: 'rule.py:keep', plain: a.txt}\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    taskset = load_taskset(str(tmp_path / "config.yaml"))
    config = taskset.config
    assert (config.lists, config.plain) == ([str(tmp_path / "a.txt"), "nowhere.txt"], "a.txt")
    assert config.keep == f"{tmp_path / 'rule.py'}:keep"
    before = taskset_fingerprint(taskset)
    (tmp_path / "rule.py").write_text("def keep(row): return False\n")
    assert before.differences(taskset_fingerprint(taskset)) == ["code of Words changed"]


def _parse_deeper(depth=30):
    return _parse_deeper(depth - 1) if depth else ast.parse("1")


class _PrintsATraceback:
    """Garbage that parses Python code when it is collected, as the traceback of a task that nobody awaited does."""

    left = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        _parse_deeper()
        if _PrintsATraceback.left:
            _PrintsATraceback.left -= 1
            _PrintsATraceback()


@pytest.fixture
def garbage():
    """A parse of anything but a few lines is interrupted once by another; then it is tried again."""
    threshold = gc.get_threshold()

    def leave(times):
        gc.collect()
        _PrintsATraceback.left = times
        gc.set_threshold(200)
        _PrintsATraceback()

    yield leave
    _PrintsATraceback.left = 0
    gc.set_threshold(*threshold)
    gc.collect()


def test_code_is_read_while_the_garbage_collector_prints_tracebacks(garbage):
    class Endless(Taskset):
        INFINITE = True

        def task_at(self, index):
            return Task(prompt=str(self.seed + index))

    shuffled = TasksetConfig(shuffle=ShuffleConfig(seed=1))
    for read in (lambda: Endless(shuffled), lambda: field_docs(TasksetConfig), lambda: with_imports(Path(__file__))):
        garbage(3)
        assert read()


# Packages of others


def install(folder, monkeypatch, module: str, name: str = "their-tasks") -> None:
    """A package with a taskset, as pip leaves it in a folder of packages."""
    packages = folder / "site-packages"
    info = packages / "their_tasks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-tasks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[treetune.tasksets]\n{name} = their_tasks:Theirs\n")
    (packages / "their_tasks.py").write_text(module)
    monkeypatch.syspath_prepend(str(packages))


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("def read():\n    return {}['missing']\nread()", "KeyError: 'missing'"),
        ("import json\njson.loads('{')", "JSONDecodeError"),
        ("import their_needs", "No module named 'their_needs'"),
        ("import sys\nsys.exit(3)", "it calls sys.exit(3)"),
        ("Other = 1", "no attribute 'Theirs'"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_its_authors_fault(treetune, tmp_path, monkeypatch, module, told):
    install(tmp_path, monkeypatch, module)
    for arguments in (("show", "their-tasks"), ("eval", "their-tasks", "-m", "scripted:gold"), ("list", "their-tasks")):
        result = treetune(*arguments)
        assert result.code == 2
        assert "the taskset 'their-tasks' of the package their-tasks could not be imported" in result.err
        assert told in result.err
        assert "Other" in module or "their_tasks.py, line 2" in result.err or "their_tasks.py, line 1" in result.err
        assert "not in Treetune" in result.err
        assert "bug in Treetune" not in result.err
        assert "Traceback" not in result.err
    listed = treetune("list", "--json")  # goes on
    assert listed.json["tasksets"]["their-tasks"]["about"].startswith("cannot be loaded")


def test_a_package_that_fails_later_is_named_too(treetune, tmp_path, monkeypatch):
    methods = ["INFINITE = True", "def task_at(self, index): ...", "def select_tasks(self, number): 1 / 0"]
    broken = "\n    ".join(["from treetune import Taskset\nclass Theirs(Taskset):", *methods])
    install(tmp_path, monkeypatch, broken)
    result = treetune("show", "their-tasks")
    assert result.code == 3
    assert "bug in Treetune" not in result.err
    assert "line 5, in the package their-tasks: please report it to its author" in result.err


def test_a_file_that_raises_says_on_which_line(treetune, tmp_path):
    (tmp_path / "raises.py").write_text("def read():\n    raise ValueError('no data')\n\nread()\n")
    assert (
        "raises.py could not be imported: ValueError: no data (raises.py, line 2)"
        in treetune("show", "raises.py:X").err
    )


def test_a_file_without_the_name_of_a_class_is_told_which_there_are(tmp_path, treetune):
    (tmp_path / "mine.py").write_text("from treetune import Taskset\n\nclass Mine(Taskset):\n    pass\n")
    told = treetune("eval", "mine.py", "-m", "scripted:gold")
    assert told.code == 2
    assert "name the class too: mine.py:Mine" in told.err


def test_a_misspelt_list_of_tasks_is_found(tmp_path, treetune):
    (tmp_path / "tasks.yaml").write_text("# one\ntrain_task: []\n")
    told = treetune("build", "tasks.yaml")
    assert told.code == 2
    assert "line 2, train_task: unknown key; did you mean 'train_tasks'?" in told.err
