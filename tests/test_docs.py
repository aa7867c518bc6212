"""The docs are true: every file they show is written, every program and command they show is run, in order, as a reader
would copy them (`tests/support/reader.py`)."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import venvs
import yaml
from gateway_playing import running_engine
from hub import Hub
from ray_start import RayCluster
from reader import FENCE, NOT_THERE, WHY_NOT, Reader, blocks_of, commands_of, read_with
from ready_hub import pinned_revisions, write_parquet, write_sets

from treetune import Run
from treetune.sandbox import probe

ROOT = Path(__file__).parents[1]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_site" not in path.parts)
EXAMPLES = sorted(ROOT.glob("examples/*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *EXAMPLES]
KINDS = {"bash", "python", "yaml", "json", "jsonl", "toml", "text"}
ONLY_SHOWN = {
    "step   0  0.52  ##########################": "as measured; test_a_page_trains_a_model_that_gets_better",
    "guess-a-number/": "the files that `treetune init` writes; tests/cli/test_init.py",
    "Act: bash            Act: answer(42)        Act: finish": "answers; tests/builtin/test_os_interaction.py",
    '{"name": "counting", "num_tasks": 10, "by_index": true, "features": ["turn", "request_id"], "api_version": 2}': (
        "what another server tells; tests/serve/test_http_client.py"
    ),
    'POST /api/episode/start   {"task_index": 3, "request_id": "6f1c"}': "the wire; tests/serve/test_http_client.py",
    '[project.entry-points."treetune.environments"]': "a part of a package; tests/test_plugins.py",
    "[[orchestrator.train.source]]": "a part of prime-rl's config; tests/trainers/test_verifiers_export.py",
    "reward:": "a part of verl's config; tests/trainers/test_verl_config.py",
}
"""Blocks that are neither a file, nor a program, nor what a command prints: their first lines, each with its reason."""
LINK = re.compile(r"\]\((?!http|#)([^)#]+)?(?:#([^)]+))?\)")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)
WITH_A_HUB = ROOT / "docs/ready.md"
"""Each of its commands is a process that reads from a hub."""
WITH_RAY = ROOT / "docs/howto/ray.md"
WITH_A_GATEWAY = ROOT / "docs/serving/gateway.md"
IN_A_SANDBOX = ROOT / "docs/howto/code.md"
READ_HERE = [pytest.param(page, marks=[pytest.mark.slow] if page == WITH_A_HUB else []) for page in PAGES]
READ_HERE = [parameter for parameter in READ_HERE if parameter.values[0] != WITH_RAY]


@pytest.mark.parametrize("page", READ_HERE, ids=page_name)
def test_its_examples_run(page, treetune, tmp_path, monkeypatch):
    """What a reader copies: the whole block, as it stands."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # as in an active environment
    if page == IN_A_SANDBOX and probe().launcher is None:
        pytest.skip("no sandbox")
    if page in EXAMPLES:
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    with hub_of(tmp_path) if page == WITH_A_HUB else nullcontext({}) as environment:
        reader = Reader(page, tmp_path, treetune, environment)
        with engine_for(reader) if page == WITH_A_GATEWAY else nullcontext():
            reader.read()


@contextmanager
def engine_for(reader: Reader) -> Iterator[None]:
    """An engine at port 8000, and a tokenizer of it for the gateway, which knows no other."""
    support = ROOT / "tests/support"
    reader.environment["PYTHONPATH"] = os.pathsep.join(map(str, [support / "gateway_stand_ins", support, ROOT / "src"]))
    with running_engine() as engine:
        engine.script("calls:hermes")
        reader.ports["8000"] = engine.port
        yield


@contextmanager
def hub_of(folder: Path) -> Iterator[dict[str, str]]:
    """The hub with the ready sets, and a set of the page's own."""
    write_sets(folder / "hub")
    write_parquet(folder / "hub/my-org/capitals", "default", {"test": [{"country": "France", "capital": "Paris"}]})
    with Hub(folder / "hub") as hub:
        hub.commits |= dict.fromkeys(pinned_revisions(), hub.commits[hub.commit])
        yield hub.environment(folder / "home")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "left_out"), [("tutorial.md", "pip |python3 -m venv"), ("agents.md", "treetune train verl")]
)
def test_a_page_trains_a_model_that_gets_better(page, left_out, tmp_path):
    (tmp_path / "work").mkdir()
    environment = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}
    read_with(venvs.venv(*venvs.TRL), ROOT / "docs" / page, tmp_path / "work", left_out, environment)
    before, after = (Run(tmp_path / "work/runs" / name).mean_reward for name in ("untrained", "trained"))
    assert before < 0.7
    assert after > before + 0.2


@pytest.mark.slow
def test_the_page_on_ray_is_true_on_a_cluster(tmp_path):
    python = venvs.venv(*venvs.RAY)
    with RayCluster(python, cpus=4) as cluster:
        environment = {**cluster.environment, "TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}
        read_with(python, WITH_RAY, tmp_path, "ray (start|get-auth-token)|RAY_AUTH_MODE", environment)


def block_named(page: str, name: str) -> str:
    return next(block.body for block in blocks_of(ROOT / "docs" / page) if block.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name", "environment", "use"),
    [
        (
            "coming-from/verifiers.md",
            "double_v1.py",
            venvs.VERIFIERS,
            "import verifiers.v1 as vf; task = list(double_v1.DoubleTaskset(vf.TasksetConfig()))[3]; "
            "assert (task.data.prompt, task.data.answer) == ('Double 3.', '6')",
        ),
        (
            "coming-from/skyrl.md",
            "double_skyrl.py",
            venvs.SKYRL_GYM,
            "env = double_skyrl.DoubleEnv(extras={'reward_spec': {'ground_truth': '6'}}); "
            "assert env.step('6')['reward'] == 1.0",
        ),
        ("coming-from/verl.md", "double_verl.py", venvs.VERL, "assert double_verl.compute_score('', '6', '6') == 1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".md") else "",
)
def test_the_other_librarys_side_is_true_too(page, name, environment, use, tmp_path):
    (tmp_path / name).write_text(block_named(page, name))
    venvs.run(
        venvs.venv(*environment), "-c", f"import {Path(name).stem}; {use}", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name"),
    [("trainers/verl.md", "my_recipe.py"), ("dataset-tasks.md", "main.py"), ("dataset-tasks.md", "steps.py")],
)
def test_verl_reads_the_config_of_a_recipe_in_the_docs(page, name, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/my_recipe.yaml").write_text(block_named("trainers/verl.md", "config/my_recipe.yaml"))
    (tmp_path / name).write_text(block_named(page, name))
    config = yaml.safe_load(venvs.run(venvs.venv(*venvs.VERL), name, "--cfg", "job", cwd=tmp_path))
    assert config["train_tasks"] == [{"id": "doubles.py:Doubles", "max_rows": 100}]
    assert config["actor_rollout_ref"]["rollout"]["n"] == 8


@every_page
def test_its_blocks_are_what_they_say(page):
    blocks = blocks_of(page)
    for block in blocks:
        assert block.kind in KINDS, block
        read = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "python": compile_block}
        if block.kind in read:
            read[block.kind](block.body)
        if block.kind == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in block.body.splitlines()), block
        if block.name and block.kind != "python":
            others = "\n".join(other.body for other in blocks if other != block)
            assert Path(block.name).stem in others, f"{block}: nobody reads {block.name}"
        elif block.kind not in ("bash", "python") and not block.is_output:
            assert block.body.partition("\n")[0] in ONLY_SHOWN, f"{block}: neither used nor printed\n{block.body}"


def compile_block(body):
    compile(body, "block", "exec")


@pytest.mark.parametrize("page", [page for page in DOCS if "trainers" in page.as_posix()], ids=page_name)
def test_a_page_on_trainers_is_short(page):
    assert len(page.read_text().split()) < 1200


@every_page
def test_its_code_stands_in_fences(page):
    """An indented block has no kind, and no button to copy it."""
    text = FENCE.sub("", page.read_text())
    for before, line in pairwise(text.splitlines()):
        assert before.strip() or not line.startswith("    "), line


def test_each_reason_for_not_running_something_is_needed():
    commands = [
        one for page in PAGES for block in blocks_of(page) if block.kind == "bash" for one in commands_of(block.body)
    ]
    for kind in WHY_NOT:
        assert any(re.search(kind, command) for command in commands), kind
    shown = {block.body.partition("\n")[0] for page in PAGES for block in blocks_of(page)}
    assert set(ONLY_SHOWN) <= shown
    for reason in [*WHY_NOT.values(), *ONLY_SHOWN.values(), *(reason for _, reason in NOT_THERE.values())]:
        for file in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / file).exists(), file


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one).lower()).replace(" ", "-")
        for one in headings
    }


@every_page
def test_its_links_lead_somewhere(page):
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        place = page.parent / target if target else page
        assert place.exists(), target
        assert not anchor or place.suffix != ".md" or anchor in anchors_of(place), f"{target}#{anchor}"


def strings_of(file: Path) -> Iterator[str]:
    """The texts that a module may say; what is filled in later is a dot of dots."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    texts = {text.replace("`", "") for file in (ROOT / "src").rglob("*.py") for text in strings_of(file)}
    whole = "\0".join(texts)
    forms = [re.compile(".*".join(map(re.escape, text.split("…")))) for text in texts if "…" in text[8:]]
    told = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(told) > 25
    for message in told:
        parts = "[^\0]*".join(re.escape(part.strip()) for part in message.split("…") if part.strip())
        assert re.search(parts, whole) or any(form.fullmatch(message) for form in forms), message


def test_the_example_taskset_is_as_small_as_the_docs_say():
    assert len((ROOT / "src/treetune/tasksets/reverse_text.py").read_text().splitlines()) <= 25


def test_every_key_of_a_dataset_task_is_explained():
    from treetune.data.datasets.config import DatasetConfig

    text = (ROOT / "docs/dataset-tasks.md").read_text()
    for key in DatasetConfig.__struct_fields__:
        assert key == "extra" or f"`{key}" in text, key


def test_the_paths_of_architecture_visit_each_module_once():
    section = (ROOT / "docs/architecture.md").read_text().partition("## Six walks")[2].partition("\n## ")[0]
    paths = [re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.M) for part in section.split("\n**")[1:]]
    assert len(paths) == 6
    for path in paths:
        assert len(path) == len(set(path)) > 5
        for name in path:
            assert (ROOT / "src/treetune" / name).exists(), name


def test_the_modules_that_architecture_names_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`(\w+\.py|\w+/)`", text.partition("## Six walks")[0])
    assert len(named) > 15
    for name in named:
        assert (ROOT / "src/treetune" / name).exists(), name


def test_the_files_that_decisions_name_exist():
    named = {
        name
        for page in (ROOT / "docs/decisions").glob("*.md")
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    }
    assert len(named) > 15
    assert [
        name for name in named if not any((folder / name).exists() for folder in (ROOT / "src/treetune", ROOT))
    ] == []


def table_of(all_requirements) -> str:
    from treetune.core.environment import turns_of

    lines = [
        "| id | what | ground truth | further keys | rewards | turns | runs code |",
        "|---|---|---|---|---|---|---|",
    ]
    for id, requirements in sorted(all_requirements.items()):
        needs = "; ".join(f"`{key}`: {meaning}" for key, meaning in requirements.needs.items())
        takes = " or ".join(requirements.takes)
        code = "in a sandbox" if requirements.sandbox else "-"
        cells = (f"`{id}`", requirements.about, takes, needs or "-", requirements.rewards, turns_of(id), code)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_of_environments_is_the_codes_own():
    from treetune.catalog import ENVIRONMENTS
    from treetune.core.environment import requirements_of

    all_requirements = {id: requirements for id in ENVIRONMENTS if (requirements := requirements_of(id)) is not None}
    assert len(all_requirements) >= 5
    assert table_of(all_requirements) in (ROOT / "docs/environments.md").read_text()
