"""`treetune audit` as a person and a program use it: in the terminal, as JSON, as a page, on servers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from html import unescape
from pathlib import Path

import pytest
from kinds import write_targets

from treetune.audit.report import RULES, AuditReport, render
from treetune.core.finding import ERROR
from treetune.serve.host import ModelsConfig
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.serve.server import EnvServer
from treetune.serve.zmq.door import ZmqDoor
from treetune.tasksets.target import load_taskset

PLANTED = """
from planted_tasks import *
"""
QUICK = ("--skip", "tasks-differ,reward-differs,observations-differ,not-portable")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_errors_end_with_1_and_are_told_with_evidence_and_remedy(treetune):
    result = treetune("audit", "planted_tasks:PaysEmpty", *QUICK)
    assert result.code == 1
    assert "error: pays-empty" in result.out
    assert "12 of 12 tasks (100%) reward it in full" in re.sub(r"\s+", " ", result.out)
    assert "remedy: score 0 for an answer without content" in result.out
    assert "Not sound: 1 error, 0 warnings, 0 notes; 12 tasks tried" in re.sub(r"\s+", " ", result.out)


def test_a_sound_target_ends_with_0_and_one_json_object(treetune):
    result = treetune("audit", "planted_tasks:Sound", *QUICK, "--json")
    assert result.code == 0
    assert result.json["sound"] is True
    assert result.json["findings"] == []
    assert result.json["num_tasks"] == 12
    assert set(result.json["tried"]) | set(result.json["not_tried"]) | {*QUICK[1].split(",")} == set(RULES)


def test_wrong_usage_is_refused_before_anything_is_played(treetune):
    unknown = treetune("audit", "arithmetic", "--rules", "pays-emty")
    assert unknown.code == 2
    assert "did you mean 'pays-empty'" in unknown.err
    assert treetune("audit", "arithmetic", "--limits.timeout", "soon").code == 2
    assert treetune("audit", "no-such-taskset").code == 2


def test_the_rollouts_of_a_model_are_looked_at(treetune):
    options = ("-m", "scripted:p=0.5", "-r", "6", "--rules", "spread", "--json")
    result = treetune("audit", "planted_tasks:Sound", *options)
    assert result.code == 0
    assert result.json["spread"]["rollouts"] == 72
    assert 0.2 < result.json["spread"]["mean_reward"] < 0.8
    solved = treetune("audit", "planted_tasks:Sound", "-m", "scripted:gold", "--rules", "spread", "--json").json
    assert set(solved["by_rule"]["warning"]) == {"always-solved", "no-signal"}
    grouped = treetune("audit", "planted_tasks:Groups", "-m", "scripted:p=0.5", "--rules", "spread", "--json").json
    assert grouped["spread"]["rollouts"] == 48


def test_a_config_with_two_lists_is_compared_with_its_other_list(folder, treetune):
    one = "{loading_params: {args: [json], kwargs: {data_files: %s, split: train}}, prompt_template: '{question}', "
    one += "ground_truth: answer, data_source: sums}"
    (folder / "val.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "4"}) + "\n")
    (folder / "both.yaml").write_text(f"train_tasks: [{one % 'sums.jsonl'}]\nval_tasks: [{one % 'val.jsonl'}]\n")
    result = treetune("audit", "both.yaml", "--rules", "no-leak", "--json")
    assert result.code == 1
    assert [(found["rule"], found["tasks"]) for found in result.json["findings"]] == [("train-val-overlap", [2])]
    assert result.json["num_tasks"] == 4
    assert treetune("audit", "both.yaml", "--split", "val", "--rules", "no-leak", "--json").json["num_tasks"] == 1
    (folder / "other.yaml").write_text(f"train_tasks: [{one % 'val.jsonl'}]\n")
    other = treetune("audit", "tasks.yaml", "--val", "other.yaml", "--rules", "train-val-overlap", "--json")
    assert other.code == 1


class Served:
    """A server with both doors in a thread of its own."""

    def __init__(self, target, model="scripted:gold"):
        self._target, self._model = target, model
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        pull, http = ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))
        server = EnvServer(load_taskset(self._target), models=ModelsConfig(model=self._model), doors=[pull, http])
        await server.start()
        self.addresses = {"tcp": pull.address, "http": http.address}
        self._ready.set()
        await self._stop.wait()
        await server.close()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        return self.addresses

    def __exit__(self, *exception):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


def test_a_server_is_audited_at_both_doors(treetune):
    with Served("planted_tasks:PaysEmpty") as addresses:
        for door, address in addresses.items():
            result = treetune("audit", address, "-n", "6", "--json")
            assert result.code == 1, result.err
            found = {finding["rule"]: finding["severity"] for finding in result.json["findings"]}
            assert found == {"pays-empty": "error", "gold-unknown": "warning"}, door
            assert result.json["not_tried"]["duplicate-tasks"] == "the tasks are on a server"
            assert len(result.json["tasks"]) == 6
    with Served("planted_tasks:Sound") as addresses:
        played = treetune("audit", addresses["tcp"], "-m", "scripted:gold", "--rules", "spread", "--json").json
        assert played["spread"]["mean_reward"] == 1.0
        refused = treetune("audit", addresses["tcp"], "-m", "another")
        assert (refused.code, "it serves: scripted:gold" in refused.err) == (2, True)


EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\0\ud800"


def evil_report():
    report = AuditReport(target=EVIL, name=EVIL, model=EVIL, tasks=[1, 2], num_tasks=7)
    report.add("pays-empty", ERROR, EVIL, tasks=[1], evidence=[EVIL, "b" * 1000], remedy=EVIL)
    report.not_tried["pays-echo"] = EVIL
    return report


def test_the_page_holds_no_markup_of_a_task():
    page = render(evil_report())
    assert "<script" not in page
    assert "<img" not in page
    assert "window.hacked = 1" in unescape(page)
    assert page.count("http") == 1  # of `http-equiv`: nothing comes from elsewhere
    assert "default-src &#x27;none&#x27;" in page
    page.encode()  # what no text can hold is not in it


def test_the_page_is_written_where_it_was_asked_for(folder, treetune):
    result = treetune("audit", "planted_tasks:PaysHedged", *QUICK, "--html", "pages/report.html")
    assert result.code == 1
    page = (folder / "pages/report.html").read_text()
    assert "error: pays-hedged" in page
    assert all(rule in page for rule in RULES)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_and_runs_nothing(browser, tmp_path, scheme):
    (tmp_path / "report.html").write_text(render(evil_report()))
    emulated = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    browser.get(f"file://{tmp_path}/report.html")
    shown = browser.find_element("tag name", "article").text
    assert shown.count("<script>window.hacked = 1</script>") == 3
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return document.querySelectorAll('script, img, link').length") == 0
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(15, 20, 25)")  # the policy lets its style be
    assert [line["message"] for line in browser.get_log("browser")] == []


def test_the_docs_explain_every_rule():
    text = (Path(__file__).parents[2] / "docs/audit.md").read_text()
    assert [rule for rule in RULES if f"`{rule}`" not in text] == []
