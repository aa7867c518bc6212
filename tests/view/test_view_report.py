"""Runs as one page in a file, which needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from made_runs import make_run
from raising import raises_code
from viewed_run import HOSTILE

from treetune.errors import TreetuneError, UsageError
from treetune.view import Calls, RunList, write_report
from treetune.view.report import bundle, page_names, read_page


def parts_of(path):
    """The policy, the style, the answers and the scripts of a report."""
    text = path.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1].replace("&#x27;", "'")
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    kept = re.search(r'<script type="application/json" id="kept">(.*?)</script>', text, re.S)[1]
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', text, re.S)
    return policy, style, kept, scripts


def export(*paths, to, **options):
    return write_report(Calls(RunList(paths)), to, **options)


@pytest.fixture(scope="module")
def report(viewed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREETUNE_TASK_CACHE_DIR", str(folder / "cache"))
        return export(viewed, to=folder / "report.html")


def test_the_file_holds_what_the_pages_ask(report, viewed):
    kept = json.loads(parts_of(report.path)[2])
    assert (report.rollouts, report.of, report.note) == (240, 240, None)
    assert [run["name"] for run in kept["runs"]["runs"]] == ["a", "b"]
    assert {"0", "1"} == set(kept["run"]) == set(kept["groups"]) == set(kept["suspicious"]) == set(kept["rollouts"])
    assert len(kept["groups"]["0"]["rows"]) == 30
    assert len(kept["rollout"]) == 240
    assert kept["rollout"]["0/5"] == json.loads(Calls(RunList([viewed])).answer("rollout", b'{"run": 0, "at": 5}'))
    assert all(kept["rollout"][key]["has_tokens"] for key in kept["tokens"])
    assert kept["compare"]["0,1"][0]["verdict"]
    changed = [task for task in kept["compare"]["0,1"][0]["tasks"] if task["kind"] != "unchanged"]
    assert set(kept["pair"]) == {f"0,1/{task['uid']}/{task['occurrence']}" for task in changed}
    assert kept["words"]["numbers"]


def test_only_our_own_scripts_and_styles_may_run(report):
    policy, style, _, scripts = parts_of(report.path)
    rules = {name: value.split() for name, _, value in (part.strip().partition(" ") for part in policy.split(";"))}
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["script-src"] == [sha(script) for script in scripts]
    assert rules["style-src"] == [sha(style)]
    assert not {"'unsafe-inline'", "'unsafe-eval'", "https:", "*"} & {
        word for words in rules.values() for word in words
    }


def sha(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_hostile_text_cannot_leave_its_place(report):
    _, _, kept, scripts = parts_of(report.path)
    assert "<" not in kept
    assert len(scripts) == 4  # the libraries that are no modules, and the modules
    said = json.dumps(json.loads(kept), ensure_ascii=False)
    assert json.dumps(HOSTILE[0], ensure_ascii=False)[1:-1] in said


def test_what_has_no_room_is_left_out_and_said(viewed, tmp_path):
    made = export(viewed / "a", to=tmp_path / "report.html", most_bytes=400_000)
    kept = json.loads(parts_of(made.path)[2])
    assert 0 < made.rollouts < made.of == 120
    assert len(kept["rollout"]) == len(kept["rollouts"]["0"]["rows"]) == made.rollouts
    assert kept["note"] == made.note
    assert f"{made.rollouts} of 120 rollouts" in made.note
    assert made.size < 1_300_000
    varied = [row["variance"] or 0 for row in kept["groups"]["0"]["rows"]]
    assert varied == sorted(varied, reverse=True)


def test_a_query_chooses(viewed, tmp_path):
    calls = Calls(RunList([viewed / "a"]))
    made = write_report(calls, tmp_path / "report.html", where="failed")
    kept = json.loads(parts_of(made.path)[2])
    assert made.rollouts == made.of == len(kept["rollouts"]["0"]["rows"])
    assert all(row["reward"] is None for row in kept["rollouts"]["0"]["rows"])
    assert "'failed'" in made.note
    with raises_code("usage", "'rewrd<1'", "'reward'"):
        write_report(calls, tmp_path / "other.html", where="rewrd<1")
    assert not (tmp_path / "other.html").exists()


def test_there_must_be_a_run_and_not_too_many(tmp_path):
    with pytest.raises(UsageError, match="no run to export"):
        export(tmp_path, to=tmp_path / "report.html")
    for number in range(17):
        make_run(tmp_path / str(number), [[1.0]])
    with raises_code("usage", "17", "16"):
        export(tmp_path, to=tmp_path / "report.html")


def test_an_empty_run_and_runs_of_other_tasks_are_exported(tmp_path):
    make_run(tmp_path / "runs" / "a", [])
    make_run(tmp_path / "runs" / "b", [[1.0]], source="other")
    made = export(tmp_path / "runs", to=tmp_path / "deep" / "report.html")
    kept = json.loads(parts_of(made.path)[2])
    assert (made.rollouts, "compare" in kept) == (1, False)


# Modules as one script


def test_modules_become_one_script():
    modules = {
        "app.js": 'import { double, Box as Case } from "./lib/maths.js";\nimport {\n  half,\n} from "./lib/half.js";\n'
        "export function run() {\n  return new Case(half(double(21)));\n}\nglobalThis.result = run();",
        "lib/maths.js": 'import{half as h}from"./half.js";class Box{constructor(x){this.x=h(x)}}'
        "var double=x=>2*x;export{double,Box};",
        "lib/half.js": "const two = 2;\nexport const half = (x) => x / two;\nexport async function late() {}\n",
    }
    made = bundle("app.js", modules)
    assert made.index("module_lib_half_js =") < made.index("module_lib_maths_js =") < made.index("module_app_js =")
    assert not re.search(r"^(import|export)\b", made, re.M)
    assert "return { double: double, Box: Box };" in made


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"app.js": 'import x from "./y.js";', "y.js": ""}, "unknown form of import or export: import x"),
        ({"app.js": "export default 3;"}, "unknown form of import or export: export default"),
        ({"app.js": "export let x = 3;"}, "unknown form of import or export: export let"),
        ({"app.js": 'const x = await import("./y.js");'}, "unknown form of import or export"),
        ({"app.js": 'import { x } from "./y.js";'}, "which does not exist"),
        ({"app.js": 'import { x } from "./y.js";', "y.js": 'import { z } from "./app.js";'}, "import each other"),
    ],
)
def test_other_forms_of_modules_are_told(modules, says):
    with pytest.raises(TreetuneError, match=says):
        bundle("app.js", modules)


def test_the_pages_have_only_known_forms():
    modules = {name: read_page(name).decode() for name in page_names() if name.endswith(".js")}
    assert "module_app_js" in bundle("app.js", modules)


@pytest.mark.slow
def test_the_file_works_from_disk_in_a_browser(browser, report, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")
    browser.get_log("browser")
    for place, says in (
        ("", "model-a"),
        ("#/run/0", "essays"),
        ("#/run/0/groups", "mixed"),
        ("#/run/0/at/12", "rollout"),
        ("#/compare/0,1", "tasks in both"),
        ("#/run/1/suspicious", "judges"),
    ):
        browser.get(f"{report.path.as_uri()}{place}")
        WebDriverWait(browser, 30).until(
            lambda _, says=says: says.lower() in browser.find_element("tag name", "body").text.lower(), says
        )
    assert [line["message"] for line in browser.get_log("browser")] == []
    assert browser.execute_script("return window.hacked") is None
