"""What a taskset needs is asked before its first task, and told in the list."""

from __future__ import annotations

import pytest
from raising import raises_code

from treetune import Task, Taskset
from treetune.cli.listing import missing_extra
from treetune.evaluation import refuse_unservable
from treetune.sandbox import Capability, probe


class Plain(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]


class NeedsPackage(Plain):
    EXTRA = "no-such-package"


class NeedsInstalled(Plain):
    EXTRA = "msgspec"


class RunsCode(Plain):
    NEEDS_CONTAINER = True


def test_an_extra_that_is_not_installed_is_known():
    assert missing_extra(NeedsPackage) == "no-such-package"
    assert missing_extra(NeedsInstalled) is None
    assert missing_extra(Plain) is None


def test_the_list_says_what_is_not_installed(treetune, tmp_path):
    (tmp_path / "mine.py").write_text(
        '"""Mine."""\nfrom treetune import Taskset\nclass Mine(Taskset):\n    EXTRA = "no-such-package"\n'
    )
    assert "Not installed: pip install 'treetune[no-such-package]'" in treetune("list", "mine.py:Mine").out


def test_a_taskset_that_runs_code_is_refused_where_no_sandbox_starts(monkeypatch):
    monkeypatch.setattr("treetune.sandbox.probe", lambda: Capability(cause="it is forbidden", remedy="allow it"))
    refuse_unservable(Plain())
    with raises_code("taskset", "RunsCode", "it is forbidden", "allow it"):
        refuse_unservable(RunsCode())


def test_a_taskset_that_runs_code_is_served_where_a_sandbox_starts():
    if not probe().available:
        pytest.skip(str(probe()))
    refuse_unservable(RunsCode())
