"""Names of code as hostile data has them: thousands of spellings, and the places of a config in which they stand.

plant(folder)                     # evil.py, evilmod.py, ...: each writes `was_run` when it is run
random.choices(spellings(folder))
nest(place, attribute, number)    # the `extra_info.scorer` of a row
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from urllib.parse import quote

from treetune.config.code_files import module_name

CODE = """
open({mark!r}, "a").write(__name__ + "\\n")
from treetune import Environment, Score, Step, Task, Taskset, tool

class Evil(Taskset):
    def load_tasks(self):
        return [Task(prompt="x", reward_spec={{"ground_truth": "x"}})]
    def reward(self, task, answer):
        return 1.0

class Env(Environment):
    def step(self, action):
        return Step("", 1.0, True)

@tool
def evil(text: str) -> str:
    "Do harm."
    return text

def answer(*values):
    return "[4]"
"""


def plant(folder: Path) -> Path:
    """Puts the code that must not run into a folder; gives the file that is there once any of it has run."""
    mark = folder / "was_run"
    code = CODE.format(mark=str(mark))
    names = ["evil.py", "evilmod.py", "sub/evil.py", "evilpkg/__init__.py", "evilpkg/inner.py", "a b.py", "évil.py"]
    for name in [*names, "evil.py.py", "evil/evil.py", "spaces/inner.py", "100%.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    return mark


def spellings(folder: Path) -> list[tuple[str, str]]:
    """Places and attributes, of which no combination may run."""
    here, file = folder.name, str(folder / "evil.py")
    as_module = module_name(Path(file))
    hexed = as_module.removeprefix("treetune.config.code_files.")
    files = [
        "evil.py", "./evil.py", ".//evil.py", "././evil.py", f"../{here}/evil.py", "sub/../evil.py", "sub/evil.py",
        file, file.replace("/", "//"), os.path.relpath(file, "/"), "evil.py.py", "evil.py/../evil.py",
        "a b.py", "évil.py",
        " evil.py", "evil.py ", "\tevil.py", "evil.py\t", "evil.py\n", "\u00a0evil.py", "evil.py\u200b",
        "\u202eevil.py",
        "evil.py\0", "evil.PY", "evil.pyc", "ｅvil.py", "evil．py", "evil\u2024py", "e\u0301vil.py", "evil%2Epy",
        quote(file, ""),
        ".\\evil.py", "sub\\..\\evil.py", "..\\" + here + "\\evil.py", "C:\\evil.py", "100%.py", "~/evil.py",
        "evil.py:evil.py",
        "file://evil.py", f"file://{file}", "file:///evil.py", "file:evil.py", "FILE://evil.py", "evil/evil.py",
        "cache://00/evil.py", "cache://../evil.py", f"cache://{'0' * 32}/../../evil.py", "cache://evil.py",
        "cache:evil.py",
        "package:evil.py", "http://127.0.0.1:1/evil.py", "git://evil.py", "evil.py#", "evil.py?x", "[evil.py]",
        "{evil.py}",
    ]  # fmt: skip
    modules = [
        "evilmod", "evilmod.", ".evilmod", "..evilmod", "evilmod.evilmod", "evilpkg", "evilpkg.inner",
        "evilpkg/inner",
        "evilpkg.inner.", "evilpkg..inner", "spaces.inner", "sub.evil", "evil", "evil.py.", "evil.evil",
        "ｅvilmod", " evilmod",
        "evilmod ", "evilmod\n", "pkg://evilmod", "pkg://evilmod.py", "pkg://evilpkg/inner", "pkg://evilpkg/inner.py",
        "pkg://./evilmod", "pkg:///evilmod", "pkg://../evilmod", "pkg://evil.py", "pkg://pkg://evilmod",
        "pkg:evilmod",
        as_module, f"treetune.config.code_files/{hexed}", f"treetune/config/code_files.{hexed}", f"pkg://{as_module}",
        f"pkg://treetune.config.code_files/{hexed}",
        f"pkg://treetune/config/code_files/{hexed}", f"pkg://treetune.config.code_files.{hexed}.py",
        f"treetune.config.code_files .{hexed}",
        "treetune.evil",
        "__main__", "runpy", "importlib", "os", "subprocess", "builtins", "sys.modules", "evilmod:evilmod",
        "numpy.evilmod",
    ]  # fmt: skip
    prefixes = [
        "skyrl:", "skyrl:skyrl:", "env:", "env:env:", "verifiers:", "agentbench:", "scripted:", "openenv:",
        "ors:", "rows:",
    ]  # fmt: skip
    attributes = [
        "Evil", "Env", "evil", "answer", "a/b", "a\\b", "../b", "/", "\\", "a/b.py", "Evil.py", "evil.py",
        "a.b", ".a", "a.", "..",
        "", " ", " Evil", "Evil ", "Evil\n", "Ev il", "%45vil", "Ｅvil", "1x", "class", "__class__",
        "Evil:Evil", ":Evil", "Evil/",
    ]  # fmt: skip
    places = [*files, *modules, *(f"{prefix}{place}" for prefix in prefixes for place in ("evil.py", "evilmod", file))]
    return list(product(places, attributes))


TIC = {"id": "textarena", "game": "TicTacToe-v0", "opponent": "random"}
TABLE = {"args": ["json"], "kwargs": {"data_files": "table.json", "split": "train"}}
DATASET = {"id": "dataset", "loading_params": TABLE, "prompt_template": "{q}", "ground_truth": "a"}


def nest(place: str, attribute: str, number: int) -> str:
    """The scorer of a row that names code somewhere, as text; `number` picks where."""
    name = f"{place}:{attribute}"
    judge = {"kind": "judge", "model": f"scripted:{name}", "instruction": "x"}
    custom = {"custom_cls": {"path": place, "name": attribute}}
    node = {"id": name, "weight": 1}
    parts = [{"scorer": judge, "weight": 0.5}, {"scorer": {"kind": "exact"}, "weight": 0.5}]
    nodes = [
        node,
        custom,
        {"custom_cls": {"path": f"pkg://{place}", "name": attribute}},
        {"custom_cls": {"path": f"file://{place}", "name": attribute}},
        {"id": "mixture", "sources": [node]},
        {"id": "mixture", "sources": [{"id": "arithmetic", "weight": 1}, {**custom, "weight": 1}]},
        {"id": "union", "sources": [{"id": "mixture", "sources": [{"id": "union", "sources": [{"id": name}]}]}]},
        {"id": "reverse-text", "tools": [name]},
        {"id": "reverse-text", "tools": [{name: {}}]},
        {"id": "mixture", "sources": [{"id": "reverse-text", "tools": [name], "weight": 1}]},
        {**TIC, "opponent": name},
        {"id": "mixture", "sources": [{**TIC, "opponent": name, "weight": 1}]},
        {**DATASET, "env_class": name},
        {**DATASET, "filter": name},
        {**DATASET, "scorer": judge},
        {**DATASET, "scorer": {"kind": "weighted", "parts": parts}},
        {"id": "union", "sources": [{**DATASET, "scorer": judge}]},
        {"scorer": judge},
        {"scorer": {"kind": "weighted", "parts": parts}},
        {"scorer": {**judge, "model": "", "judges": [{"model": f"scripted:{name}"}]}},
        {"id": "rows", "files": ["inner.jsonl"], "trust": True},
        {"id": "rows", "files": ["inner.jsonl"], "scorer": judge},
        {"id": "mixture", "sources": [{"id": "rows", "files": ["inner.jsonl"], "trust": True, "weight": 1}]},
        {"id": "agentbench:tasks.yaml", "root": ".", "spec": name},
        {"custom_cls": {"path": "pkg://treetune.tasksets.shell.agentbench", "name": "AgentBenchTaskset"}, "spec": name},
        {"id": "reverse-text", "untrusted": "", "tools": [name]},
    ]
    chosen = number % (len(nodes) + 1)
    return f"env:{name}" if chosen == len(nodes) else json.dumps(nodes[chosen])


PLACES = 27
"""How many places `nest` knows."""


def row_of(scorer, index: int = 0, **columns) -> dict:
    """A row of verl's with this scorer."""
    return {
        "prompt": [{"role": "user", "content": f"Question {index}?"}],
        "data_source": "x",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": index, "scorer": scorer},
        **columns,
    }


def hostile_rows(chosen: list[tuple[str, str]], start: int = 0) -> list[dict]:
    """A harmless row, and then one for each name: in its scorer, as its environment, as a tool, in a note."""
    rows = [row_of("rule")]
    for number, (place, attribute) in enumerate(chosen, start):
        name = f"{place}:{attribute}"
        row = row_of(nest(place, attribute, number // 5), number)
        if number % 5 == 1:
            row = {**row_of(None, number), "env_class": name}
        elif number % 5 == 2:
            row["extra_info"] |= {"scorer": "rule", "treetune": json.dumps({"tools": [name]})}
        elif number % 5 == 3:
            fields = json.dumps({"game": TIC["game"], "seed": 1, "players": 2, "opponent": name, "params": {}})
            row["extra_info"] |= {"scorer": json.dumps(TIC), "treetune": json.dumps({"fields": fields})}
        elif number % 5 == 4:
            row["extra_info"] |= {"treetune": json.dumps({"extra_info": {"scorer": f"env:{name}"}})}
        rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
