"""The cache of built files: keys, hits, damage, concurrency, and its verbs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from named_code import load_object
from raising import raises_code

from treetune.data.rows import cache as cache_module
from treetune.data.rows.cache import Cache, EntryState, Sidecar, config_hash, content_hash, impl_hash
from treetune.data.sources.loading_params import LoadingParams
from treetune.errors import TreetuneError
from treetune.system.folders import default_cache_dir

KEY = "0123456789abcdef0123_" + "a" * 20
OTHER = "0123456789abcdef0123_" + "b" * 20
ROWS = b"PAR1" + b"rows" * 100 + b"PAR1"

PREAMBLE = f"""
import json, os, sys, time
from pathlib import Path
from treetune.data.rows.cache import Cache, Sidecar
cache, key = Cache(Path(sys.argv[1])), {KEY!r}
def sidecar(): return Sidecar(config={{}}, source="s", rows=3, fingerprint="f")
"""


def build(path: Path, rows: bytes = ROWS) -> Sidecar:
    path.write_bytes(rows)
    return Sidecar(config={"split": "train"}, source="json: train.jsonl", rows=3, fingerprint="f", dropped={"long": 1})


def must_not_build(path: Path) -> Sidecar:
    raise AssertionError("built although there is one")


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(folder: Path) -> list[str]:
    """All files but locks, which are empty and stay for the next build."""
    return sorted(file.name for file in folder.iterdir() if file.suffix != ".lock")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def built(cache):
    cache.get_or_build(KEY, build)
    return cache


def test_the_second_call_is_a_hit(cache):
    first, was_hit = cache.get_or_build(KEY, build)
    assert not was_hit
    assert cache.path(KEY).read_bytes() == ROWS
    assert (first.key, first.size, first.rows, first.dropped) == (KEY, len(ROWS), 3, {"long": 1})
    assert first.mtime_ns == cache.path(KEY).stat().st_mtime_ns
    assert first.created.endswith("Z")
    assert cache.get_or_build(KEY, must_not_build) == (first, True)
    assert cache.hit(KEY) == first
    assert cache.hit(OTHER) is None


def test_force_builds_again_and_keeps_the_old_file_until_the_new_one_is_whole(built):
    def rebuild(path):
        assert built.path(KEY).read_bytes() == ROWS
        return build(path, b"PAR1newPAR1")

    assert built.get_or_build(KEY, rebuild, force=True)[1] is False
    assert built.path(KEY).read_bytes() == b"PAR1newPAR1"
    assert built.get_or_build(KEY, must_not_build)[1] is True


def test_eight_processes_build_one_key_once(tmp_path):
    code = """
def build(path):
    with open(sys.argv[2], "a") as file: file.write("built\\n")
    time.sleep(0.5)
    path.write_bytes(b"PAR1 PAR1")
    return sidecar()
Path(sys.argv[3], str(os.getpid())).touch()
while not Path(sys.argv[4]).exists(): time.sleep(0.005)
_, hit = cache.get_or_build(key, build)
print(json.dumps([str(cache.path(key)), hit, cache.path(key).exists()]))
"""
    count, ready, go = tmp_path / "count", tmp_path / "ready", tmp_path / "go"
    ready.mkdir()
    processes = [start(code, tmp_path / "cache", count, ready, go) for _ in range(8)]
    deadline = time.monotonic() + 60
    while len(list(ready.iterdir())) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    go.touch()
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert count.read_text() == "built\n"
    assert {path for path, _, _ in answers} == {str(tmp_path / "cache" / f"{KEY}.parquet")}
    assert sorted(hit for _, hit, _ in answers) == [False] + [True] * 7
    assert all(exists for _, _, exists in answers)


def test_a_build_killed_in_the_middle_is_built_by_the_next_call(cache, tmp_path):
    code = """
def build(path):
    path.write_bytes(b"PAR1 half")
    Path(sys.argv[2]).touch()
    time.sleep(60)
cache.get_or_build(key, build)
"""
    process = start(code, cache.folder, tmp_path / "begun")
    wait_for(tmp_path / "begun")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (leftover,) = names(cache.folder)
    assert leftover.startswith(f".{KEY}.")
    assert [(entry.state, entry.size) for entry in cache.entries()] == [(EntryState.UNFINISHED, 9)]

    def build_in_a_clean_folder(path):
        assert names(cache.folder) == []
        return build(path)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(KEY, build_in_a_clean_folder)[1] is False
    assert names(cache.folder) == [f"{KEY}.json", f"{KEY}.parquet"]


def test_a_build_killed_between_its_two_renames_does_not_count(built):
    (built.folder / f"{KEY}.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built.hit(KEY) is None
        assert built.get_or_build(KEY, build)[1] is False


def truncate(cache):
    os.truncate(cache.path(KEY), len(ROWS) // 2)


def flip_one_byte(cache):
    with open(cache.path(KEY), "r+b") as file:
        file.seek(len(ROWS) // 2)
        file.write(b"#")


def delete_the_file(cache):
    cache.path(KEY).unlink()


def write_garbage_into_the_sidecar(cache):
    (cache.folder / f"{KEY}.json").write_bytes(b'{"key": "\xff')


def empty_the_sidecar(cache):
    (cache.folder / f"{KEY}.json").write_bytes(b"{}")


def give_it_another_keys_files(cache):
    cache.get_or_build(OTHER, lambda path: build(path, b"PAR1otherPAR1"))
    for suffix in ("json", "parquet"):
        shutil.copy2(cache.folder / f"{OTHER}.{suffix}", cache.folder / f"{KEY}.{suffix}")


DAMAGES = {
    truncate: "204 bytes instead of 408",
    flip_one_byte: "its content changed",
    delete_the_file: "the file is gone",
    write_garbage_into_the_sidecar: "its sidecar cannot be read",
    empty_the_sidecar: "its sidecar cannot be read",
    give_it_another_keys_files: "its sidecar belongs to another key",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=[damage.__name__ for damage in DAMAGES])
def test_damage_is_noticed_and_built_again_with_a_warning(built, damage, reason):
    damage(built)
    assert {entry.key: entry.state for entry in built.entries()}[KEY] is EntryState.DAMAGED
    with pytest.warns(UserWarning, match=rf"is damaged \({reason}\), building it again") as caught:
        assert built.get_or_build(KEY, build)[1] is False
    assert len(caught) == 1
    assert built.path(KEY).read_bytes() == ROWS
    assert built.get_or_build(KEY, must_not_build)[1] is True


def test_a_copied_file_with_another_time_is_a_hit_and_is_hashed_only_once(built, monkeypatch):
    os.utime(built.path(KEY), (1, 1))
    sidecar = built.hit(KEY)
    assert sidecar is not None
    assert sidecar.mtime_ns == 1_000_000_000
    monkeypatch.setattr(cache_module, "file_hash", lambda file: pytest.fail("hashed again"))
    assert built.hit(KEY) == sidecar


def test_a_failing_build_leaves_nothing_and_the_next_succeeds(cache):
    def fail(path):
        path.write_bytes(b"PAR1 half")
        raise ZeroDivisionError

    def write_what_cannot_be_noted(path):
        build(path)
        return Sidecar(config={"object": object()}, source="s", rows=1, fingerprint="f")

    for broken, error in {
        fail: ZeroDivisionError,
        write_what_cannot_be_noted: TypeError,
    }.items():
        with pytest.raises(error):
            cache.get_or_build(KEY, broken)
        assert names(cache.folder) == []
    assert cache.get_or_build(KEY, build)[1] is False


def test_waiting_for_another_builder_is_said_once(cache, tmp_path, monkeypatch):
    code = """
def build(path):
    Path(sys.argv[2]).touch()
    time.sleep(1)
    path.write_bytes(b"PAR1 PAR1")
    return sidecar()
cache.get_or_build(key, build)
"""
    monkeypatch.setattr(cache_module, "QUIET_WAIT", 0.2)
    process = start(code, cache.folder, tmp_path / "begun")
    wait_for(tmp_path / "begun")
    with pytest.warns(UserWarning, match="another process is building") as caught:
        assert cache.get_or_build(KEY, must_not_build)[1] is True
    assert len(caught) == 1
    process.communicate(timeout=30)


def test_a_hit_imports_nothing_heavy(built, tmp_path):
    (tmp_path / "data.jsonl").write_text("{}\n")
    code = f"""
import sys
from pathlib import Path
from treetune.data.rows.cache import Cache, config_hash, impl_hash
from treetune.data.rows.cache import content_hash
from treetune.data.sources.loading_params import LoadingParams
impl_hash(Cache, object, [], 1)
sources = LoadingParams(args=["json"], kwargs={{"data_files": sys.argv[2]}}).local_sources()
config_hash({{"a": 1}}, {{"0": content_hash(sources[0], None)}})
assert Cache(Path(sys.argv[1])).get_or_build({KEY!r}, None)[1]
print(*sys.modules)
"""
    command = [sys.executable, "-c", code, built.folder, tmp_path / "data.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy = {"pyarrow", "datasets", "omegaconf", "rich", "typer", "asyncio", "filelock", "numpy", "pandas", "yaml"}
    assert not set(done.stdout.split()) & heavy


def test_declaring_a_task_loads_nothing_that_starts_processes():
    code = (
        "import sys; from treetune_verl.tasks import Task; "
        "Task({'loading_params': {'args': ['json']}, 'ground_truth': {'column': 'answer', 'pattern': '#### (.+)'}}); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"subprocess", "multiprocessing", "shutil", "statistics", "pyarrow"}


def test_a_read_only_cache_gives_hits_and_refuses_builds(built, tmp_path):
    os.utime(built.folder / f"{KEY}.json", (1, 1))
    os.utime(built.path(KEY), (1, 1))  # a hit would like to note this new time, and must do without
    code = f"""
assert cache.get_or_build({KEY!r}, None)[1]
try: cache.get_or_build({OTHER!r}, lambda path: sidecar())
except Exception as error: print(type(error).__name__, error)
"""
    shutil.copytree(built.folder, tmp_path / "read-only")
    (tmp_path / "read-only").chmod(0o555)
    command = [sys.executable, "-c", PREAMBLE + code, tmp_path / "read-only"]
    if os.geteuid() == 0:  # root may write anywhere, unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv to try this as root")
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "read-only").iterdir()}
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "StorageError cannot write to the cache folder" in done.stdout
    assert "TREETUNE_TASK_CACHE_DIR" in done.stdout
    after = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "read-only").iterdir()}
    assert after.keys() == before.keys()


def test_the_folder_is_the_argument_then_the_environment_then_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TREETUNE_TASK_CACHE_DIR", raising=False)
    assert default_cache_dir() == tmp_path / ".cache/treetune/tasks"
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", "~/elsewhere")
    assert default_cache_dir() == tmp_path / "elsewhere"
    assert default_cache_dir("~/here") == tmp_path / "here"
    monkeypatch.chdir(tmp_path)
    assert default_cache_dir("relative") == tmp_path / "relative"


class Stop:
    pass


BASE = "from test_cache import Stop\nclass Base(Stop):\n    shift = 1\n"
CHILD = """from pathlib import Path
from named_code import load_object
Base = load_object(f"{Path(__file__).with_name('base.py')}:Base")
class Child(Base, dict): pass
"""


def child_in(folder: Path, base: str = BASE, child: str = CHILD) -> type:
    """A class and its base in two files of their own."""
    folder.mkdir()
    (folder / "base.py").write_text(base)
    (folder / "child.py").write_text(child)
    cls = load_object(f"{folder / 'child.py'}:Child")
    assert isinstance(cls, type)
    return cls


def test_the_implementation_hash_follows_the_bytes_of_the_class_and_its_bases(tmp_path):
    def hash_of(cls, further=(), version=1):
        return impl_hash(cls, Stop, list(further), version)

    child = child_in(tmp_path / "a")
    original = hash_of(child)
    assert len(original) == 20
    assert hash_of(child_in(tmp_path / "moved")) == original
    assert hash_of(child_in(tmp_path / "changed", child=CHILD + "#")) != original
    assert hash_of(child_in(tmp_path / "base_changed", base=BASE.replace("1", "2"))) != original
    assert hash_of(child, version=2) != original
    (tmp_path / "rule.py").write_text("def keep(row): return True\n")
    with_rule = hash_of(child, [tmp_path / "rule.py"])
    assert with_rule != original
    (tmp_path / "rule.py").write_text("def keep(row): return row \n")
    assert hash_of(child, [tmp_path / "rule.py"]) not in (original, with_rule)


def test_a_base_after_the_taskset_in_the_order_of_bases_counts_too(tmp_path):
    (tmp_path / "late.py").write_text("class Late: pass\n")
    late = load_object(f"{tmp_path / 'late.py'}:Late")
    with_late = type("Mine", (Stop, late), {"__module__": __name__})
    without = type("Mine", (Stop,), {"__module__": __name__})
    assert impl_hash(with_late, Stop, [], 1) != impl_hash(without, Stop, [], 1)


def test_treetunes_own_files_count_by_the_builders_version_alone():
    from treetune.core.taskset import Taskset
    from treetune.tasksets.arithmetic import Arithmetic

    assert impl_hash(Arithmetic, Taskset, [], 1) == impl_hash(Stop, Stop, [], 1)


def test_a_class_without_a_source_file_is_refused():
    cls = type("Typed", (Stop,), {"__module__": "nowhere"})
    with raises_code("failed", "Typed"):
        impl_hash(cls, Stop, [], 1)
    with raises_code("failed", "Typed", "Mine"):
        impl_hash(type("Mine", (cls,), {"__module__": __name__}), Stop, [], 1)


def test_the_config_hash_follows_values_and_not_the_order_of_keys():
    config = {"a": {"x": 1, "y": [1, 2]}, "b": "text"}
    same = {"b": "text", "a": {"y": [1, 2], "x": 1}}
    assert config_hash(config, {"f": "1"}) == config_hash(same, {"f": "1"})
    assert len(config_hash(config, {})) == 20
    different = [
        config_hash(config, {"f": "1"}),
        config_hash(config, {"f": "2"}),
        config_hash(config, {}),
        config_hash({**config, "b": "texu"}, {"f": "1"}),
        config_hash({**config, "a": {"x": 1, "y": [2, 1]}}, {"f": "1"}),
    ]
    assert len(set(different)) == len(different)
    with pytest.raises(TreetuneError, match="cannot be part of a cache key"):
        config_hash({"a": object()}, {})


def test_two_processes_agree_on_every_hash(tmp_path):
    child_in(tmp_path / "code")
    (tmp_path / "data").mkdir()
    for name in "zyx":
        (tmp_path / "data" / name).write_text(name)
    code = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent / 'support')]
from treetune.data.rows.cache import config_hash, impl_hash
from treetune.data.rows.cache import content_hash
from named_code import load_object
from test_cache import Stop
here = Path(sys.argv[1])
cls = load_object(f"{here / 'code' / 'child.py'}:Child")
configs = {"b": {"c": 2.5, "d": None}, "a": 1}, {"set": {"p", "q", "r", "s"}}
print(impl_hash(cls, Stop, [], 1), content_hash(here / "data", None), *(config_hash(c, {"x": "y"}) for c in configs))
"""
    answers = set()
    for seed in ("1", "2", "3"):
        command = [sys.executable, "-c", code, tmp_path, Path(__file__).parent]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        answers.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert len(answers) == 1


def large_file(path: Path, byte: bytes = b"a") -> Path:
    path.write_bytes(byte * (1 << 20))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


@pytest.fixture
def reads(monkeypatch):
    """Counts how often a file's bytes are read; files count as settled at once."""
    counted: list[int] = []
    original = cache_module.file_hash

    def counting(file):
        counted.append(1)
        return original(file)

    monkeypatch.setattr(cache_module, "file_hash", counting)
    monkeypatch.setattr(cache_module, "SETTLED_NS", 0)
    return counted


def test_an_unchanged_large_file_is_read_once(tmp_path, reads):
    file = large_file(tmp_path / "large")
    first = content_hash(file, tmp_path / "memory")
    assert content_hash(file, tmp_path / "memory") == first
    assert len(reads) == 1
    assert content_hash(file, None) == first
    assert len(reads) == 2


def test_a_large_file_changed_behind_its_size_and_time_is_read_again(tmp_path, reads):
    file = large_file(tmp_path / "large")
    first = content_hash(file, tmp_path / "memory")
    status = file.stat()
    time.sleep(0.02)  # one tick of the kernel's clock
    with open(file, "r+b") as opened:
        opened.write(b"b")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (status.st_size, status.st_mtime_ns, status.st_ino)
    assert content_hash(file, tmp_path / "memory") != first


def test_a_file_that_was_just_changed_and_a_small_one_are_not_remembered(tmp_path):
    content_hash(large_file(tmp_path / "large"), tmp_path / "memory")  # its time is old, but not that of its inode
    (tmp_path / "small").write_text("small")
    content_hash(tmp_path / "small", tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff{", b"{}", b'{"hash": 3}'])
def test_a_damaged_memory_is_ignored_and_written_anew(tmp_path, reads, damage):
    file = large_file(tmp_path / "large")
    first = content_hash(file, tmp_path / "memory")
    (note,) = (tmp_path / "memory").iterdir()
    note.write_bytes(damage)
    assert content_hash(file, tmp_path / "memory") == first
    assert content_hash(file, tmp_path / "memory") == first
    assert len(reads) == 2


def test_a_folder_is_its_names_and_what_they_contain(tmp_path):
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.json").write_text("1")
    (folder / "b.json").write_text("2")
    seen = [content_hash(folder, None)]
    shutil.copytree(folder, tmp_path / "copy")
    assert content_hash(tmp_path / "copy", None) == seen[0]
    (folder / ".cache").write_text("what a download leaves")
    (folder / "loop").symlink_to(folder)
    assert content_hash(folder, None) == seen[0]
    (folder / "train" / "a.json").write_text("3")
    seen.append(content_hash(folder, None))
    (folder / "b.json").rename(folder / "c.json")
    seen.append(content_hash(folder, None))
    (folder / "train" / "empty.json").touch()
    seen.append(content_hash(folder, None))
    assert len(set(seen)) == 4


def test_the_order_in_which_a_disk_lists_a_folder_makes_no_difference(tmp_path, monkeypatch):
    for name in ("a.json", "b.json", "c.json"):
        (tmp_path / name).write_text(name)
    hashes = set()
    for listing in (["a.json", "b.json", "c.json"], ["c.json", "a.json", "b.json"]):
        monkeypatch.setattr(os, "walk", lambda *_, names=listing, **__: [(str(tmp_path), [], names)])
        hashes.add(content_hash(tmp_path, None))
    assert len(hashes) == 1


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The current folder: some files, and a folder with the name of a format."""
    for name in ("a.json", "b.json", "sub/c.json", "sub/deep/d.json", "set/README.md", "set/e.json", "json/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SOURCES = [
    (["openai/gsm8k"], {"name": "main", "split": "train"}, []),
    (["openai/gsm8k"], {"data_files": "a.json", "data_dir": "sub"}, []),
    (["gsm8k", "main"], {}, []),
    (["hf://datasets/openai/gsm8k"], {}, []),
    (["json"], {"data_files": "https://example.com/a.json"}, []),
    (["json"], {"data_files": ["hf://datasets/x/y/a.json", "a.json"]}, ["a.json"]),
    (["json"], {"data_files": "a.json"}, ["a.json"]),
    (["json"], {"data_files": "{}/a.json"}, ["a.json"]),
    (["json"], {"data_files": "file://{}/a.json"}, ["a.json"]),
    (["csv"], {"data_files": "zip://*.csv::{}/a.json"}, ["a.json"]),
    (["json", None, None, "a.json"], {}, ["a.json"]),
    ([], {"path": "json", "data_files": Path("a.json")}, ["a.json"]),
    (["json"], {"data_files": {"train": ["b.json", "a.json"], "test": "a.json"}}, ["a.json", "b.json"]),
    (["json"], {"data_files": [{"split": "sub", "path": ["b.json"]}]}, ["b.json"]),
    (["json"], {"data_files": "*.json"}, ["a.json", "b.json"]),
    (["json"], {"data_files": "sub/**/*.json"}, ["sub/c.json", "sub/deep/d.json"]),
    (["json"], {"data_files": "c.json", "data_dir": "sub"}, ["sub/c.json"]),
    (["json"], {"data_dir": "sub"}, ["sub"]),
    (["json"], {"data_files": "absent.json"}, []),
    (["newformat"], {"data_files": "a.json"}, ["a.json"]),
    (["set"], {}, ["set"]),
    (["{}/set"], {}, ["set"]),
    (["./set"], {"data_files": "e.json"}, ["set/README.md", "set/e.json"]),
    (["sub"], {"data_dir": "deep"}, ["sub/deep"]),
    (["sub"], {"data_dir": "deep", "data_files": "*.json"}, ["sub/deep/d.json"]),
    (["{}/a.json"], {}, ["a.json"]),
]


@pytest.mark.parametrize(("args", "kwargs", "expected"), SOURCES, ids=[f"{args} {kw}" for args, kw, _ in SOURCES])
def test_the_local_sources_are_what_load_dataset_would_read(data, args, kwargs, expected):
    def here(value):
        return value.replace("{}", str(data)) if isinstance(value, str) else value

    given = {key: here(value) for key, value in kwargs.items()}
    params = LoadingParams(args=[here(value) for value in args], kwargs=given)
    assert params.local_sources() == [data / name for name in expected]


def test_entries_say_what_there_is_and_leave_foreign_files_alone(built):
    built.get_or_build(OTHER, lambda path: build(path, b"PAR1otherPAR1"))
    os.utime(built.folder / f"{KEY}.json", (1, 1))
    truncate(built)
    for foreign in ("notes.json", "train.parquet"):
        (built.folder / foreign).write_text("mine")
    newer, older = built.entries()
    assert (newer.key, newer.state, newer.rows, newer.source) == (OTHER, EntryState.OK, 3, "json: train.jsonl")
    assert (older.key, older.state, older.last_used) == (KEY, EntryState.DAMAGED, 1)
    assert newer.size == sum((built.folder / f"{OTHER}.{suffix}").stat().st_size for suffix in ("json", "parquet"))
    assert len(built.prune(older_than_days=None, all=True, damaged=False)) == 2
    assert sorted(file.name for file in built.folder.iterdir()) == ["notes.json", "train.parquet"]
    assert Cache(built.folder / "absent").entries() == []


def test_a_hit_notes_that_it_was_used_without_touching_the_file(built):
    os.utime(built.folder / f"{KEY}.json", (1, 1))
    before = built.path(KEY).stat().st_mtime_ns
    built.entries()
    assert built.entries()[0].last_used == 1
    built.hit(KEY)
    assert time.time() - built.entries()[0].last_used < 60
    assert built.path(KEY).stat().st_mtime_ns == before


def test_prune_removes_what_is_selected(built):
    built.get_or_build(OTHER, build)
    days_ago = time.time() - 10 * 86400
    os.utime(built.folder / f"{KEY}.json", (days_ago, days_ago))
    assert built.prune(older_than_days=11, all=False, damaged=False) == []
    assert [entry.key for entry in built.prune(older_than_days=9, all=False, damaged=False)] == [KEY]
    assert names(built.folder) == [f"{OTHER}.json", f"{OTHER}.parquet"]
    built.get_or_build(KEY, build)
    truncate(built)
    (built.folder / f".{OTHER}.1.tmp").write_text("left by a killed refresh of a whole file")
    assert [entry.key for entry in built.prune(older_than_days=None, all=False, damaged=True)] == [KEY]
    assert [entry.key for entry in built.prune(older_than_days=None, all=True, damaged=False)] == [OTHER]
    assert list(built.folder.iterdir()) == []


def test_prune_leaves_what_is_being_built(cache, tmp_path):
    code = """
def build(path):
    path.write_bytes(b"PAR1")
    Path(sys.argv[2]).touch()
    while not Path(sys.argv[3]).exists(): time.sleep(0.01)
    path.write_bytes(b"PAR1 PAR1")
    return sidecar()
cache.get_or_build(key, build)
"""
    process = start(code, cache.folder, tmp_path / "begun", tmp_path / "go")
    wait_for(tmp_path / "begun")
    assert cache.prune(older_than_days=0, all=True, damaged=True) == []
    (tmp_path / "go").touch()
    assert process.wait(timeout=30) == 0
    process.communicate()
    assert cache.get_or_build(KEY, must_not_build)[1] is True


@pytest.fixture
def verb(built, treetune):
    """`treetune cache ARGUMENTS` on a cache with one entry."""
    return lambda *arguments: treetune("cache", *arguments, "--cache-dir", built.folder)


def test_list_shows_each_entry_and_the_total(built, verb):
    built.get_or_build(OTHER, build)
    truncate(built)
    text = verb("list").out
    assert "012345_bbbbbbbb" in text
    assert "json: train.jsonl" in text
    assert "damaged (204 bytes instead of 408)" in text
    assert f"2 built in {built.folder}" in text
    listed = verb("list", "--json").json
    assert {entry["key"]: entry["state"] for entry in listed["entries"]} == {KEY: "damaged", OTHER: "ok"}
    assert listed["size"] == sum(entry["size"] for entry in listed["entries"])


def test_show_takes_a_beginning_and_refuses_an_unclear_one(built, verb):
    built.get_or_build(OTHER, build)
    shown = verb("show", "012345_aaaaaaaa", "--json").json
    assert (shown["key"], shown["path"]) == (KEY, str(built.path(KEY)))
    assert shown["sidecar"]["config"] == {"split": "train"}
    text = verb("show", KEY[:22]).out
    assert str(built.path(KEY)) in text
    assert "source: 'json: train.jsonl'" in text
    unclear = verb("show", "0123")
    assert unclear.code == 2
    assert KEY in unclear.err
    assert OTHER in unclear.err
    unknown = verb("show", "012345_aaaaaaab")
    assert unknown.code == 2
    assert "did you mean '012345_aaaaaaaa'" in unknown.err


def test_prune_says_what_it_removed_and_needs_a_selection(built, verb):
    nothing = verb("prune")
    assert nothing.code == 2
    for flag in ("--older-than", "--damaged", "--all"):
        assert flag in nothing.err
    assert "nothing to remove" in verb("prune", "--damaged").out
    assert "nothing to remove" in verb("prune", "--older-than", 1).out
    (entry,) = built.entries()
    removed = verb("prune", "--older-than", 0, "--json").json
    assert removed["freed"] == entry.size
    assert [entry["key"] for entry in removed["removed"]] == [KEY]
    built.get_or_build(KEY, build)
    text = verb("prune", "--all").out
    assert "012345_aaaaaaaa" in text
    assert "1 removed" in text
    assert "freed" in text
    assert "nothing is built" in verb("list").out
