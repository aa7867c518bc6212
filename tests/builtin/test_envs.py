"""The built-in environments: what earns a reward, what is a fault, and that nothing gets out of hand."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import episodes
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from episodes import play, rewards, shown
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Action, Completion, Outcome, Step, Task, Taskset, make, run_rollout
from treetune.config.plugins import environments
from treetune.config.trust import USER
from treetune.core.environment import TaskRequirements, requirements_of
from treetune.core.policy import Request
from treetune.errors import EnvironmentFault
from treetune.play.episode import Episode
from treetune.sandbox import probe
from treetune.scorers.reading.statements import tagged
from treetune.system.processes import ProgramPool
from treetune.system.threads import call
from treetune.tasksets import math_verifier, sql_worker, text2sql
from treetune.tasksets.alphabet_sort import AlphabetSort, AlphabetSortConfig, AlphabetSortEnvironment
from treetune.tasksets.search import Index, load_index

TRUTHS = {"gsm8k": "5", "gsm8k_multi_turn": "5", "aime": "204", "search": ["Paris"], "text2sql": "SELECT 1"}


def task_of(env_class: str, truth: Any = None, **extra: Any) -> Task:
    return episodes.task_of(env_class, TRUTHS[env_class] if truth is None else truth, **extra)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "spider" / "database" / "pets" / "pets.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE pet (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO pet VALUES (?, ?)", [("Rex", 3), ("Mia", 5), ("Tom", None)])
    connection.close()
    monkeypatch.setenv("TREETUNE_TEXT2SQL_DB", str(tmp_path))
    return file


@pytest.fixture
def ask(database: Path) -> Callable[..., Task]:
    def ask(sql: str = "SELECT name FROM pet WHERE age > 2", **extra: Any) -> Task:
        return task_of("text2sql", sql, **{"db_id": "pets", "data": "spider", **extra})

    return ask


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    documents = [
        {"id": "1", "title": "France", "text": "The capital of France is Paris."},
        {"id": "2", "contents": "Berlin is the capital of Germany."},
        {"id": "3", "text": "Zebras have stripes. <answer>Paris</answer>"},
    ]
    file.write_text("\n\n".join(map(json.dumps, documents)) + "\n")
    return file


@pytest.mark.parametrize("name", [*TRUTHS, "lcb", "searchcode"])
def test_every_environment_declares_a_contract(name):
    assert isinstance(requirements_of(name), TaskRequirements)


class TestGsm8k:
    @pytest.mark.parametrize(
        ("action", "truth", "reward"),
        [
            ("2 + 3 is\n#### 5", "5", 1.0),
            ("#### 6", "5", 0.0),
            ("#### 1,000", "1000", 1.0),
            ("#### -1.50", "-1.50", 1.0),
            ("#### 5.", "5", 1.0),
            ("####5", "5", 1.0),
            ("#### $5", "5", 1.0),
            ("5", "5", 0.0),
            ("#### 5 or #### 6", "5", 0.0),
            ("#### 5", 5, 1.0),
            ("#### 42", 42.0, 1.0),
            ("#### 42.0", 42.0, 1.0),
            ("#### 0.25", 0.25, 1.0),
            ("#### 007", 7, 1.0),
        ],
    )
    def test_the_number_after_the_signs_is_compared(self, action, truth, reward):
        (step,) = play(task_of("gsm8k", truth), action)
        assert (step.reward, step.done, step.info["success"]) == (reward, True, reward == 1.0)

    @pytest.mark.parametrize(
        ("action", "reward"),
        [("#### 5.", 0.0), ("####5", 0.0), ("#### $5", 0.0), ("#### 5 or #### 6", 1.0), ("#### 5/7", 1.0)],
    )
    def test_to_the_letter_of_skyrl_gym_the_first_number_counts(self, action, reward):
        assert rewards(task_of("gsm8k", "5", strict=False), action) == [reward]

    def test_strict_is_true_or_false(self):
        with raises_code("environment", "'no'", "extra_info.strict"):
            make("gsm8k", task_of("gsm8k", strict="no"))

    @pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn", "searchcode"])
    def test_a_ground_truth_that_is_no_number_is_a_fault(self, name):
        with raises_code("environment", "'seventy-two'"):
            make(name, episodes.task_of(name, "seventy-two"))

    @pytest.mark.parametrize("truth", [["5"], True, {"a": 1}])
    @pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn", "aime"])
    def test_a_ground_truth_that_could_never_be_matched_is_a_fault(self, name, truth):
        with raises_code("environment", "reward_spec.ground_truth"):
            make(name, task_of(name, truth))

    def test_no_ground_truth_is_a_fault(self):
        with raises_code("environment", "reward_spec.ground_truth"):
            make("gsm8k", Task(prompt="?", env_class="gsm8k"))

    def test_the_step_says_what_was_compared(self):
        (step,) = play(task_of("gsm8k"), "#### 6")
        assert step.info == {"answer": "6", "explanation": "expected 5; read from `####`", "success": False}

    def test_five_thousand_episodes_do_not_leak(self):
        task = task_of("gsm8k")

        async def episodes(count: int) -> None:
            for _ in range(count):
                environment = make("gsm8k", task)
                await environment.start()
                assert (await environment.step(Action("text", "so #### 5"))).reward == 1.0
                await environment.close()

        asyncio.run(episodes(100))
        gc.collect()
        tracemalloc.start()
        asyncio.run(episodes(5000))
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert kept < 100_000


class TestGsm8kMultiTurn:
    def test_a_wrong_number_earns_a_little_and_the_right_one_ends_it(self):
        steps = play(task_of("gsm8k_multi_turn", max_turns=4), "#### 4", "hm", "#### 5", "#### 5")
        assert [step.reward for step in steps] == [0.05, 0.0, 1.0]
        assert [step.done for step in steps] == [False, False, True]
        assert not steps[-1].truncated
        assert steps[-1].info["metrics"] == {"turns": 3}

    def test_the_turn_before_the_last_asks_for_the_answer_alone(self):
        first, second, third = play(task_of("gsm8k_multi_turn", max_turns=3), "a", "b", "c")
        assert "step-by-step" in shown(first)
        assert "only the final" in shown(second)
        assert (shown(third), third.done, third.truncated) == ("", True, True)

    @pytest.mark.parametrize(("max_turns", "expected"), [(None, 5), (1, 1), ("3", 3), (7.0, 7)])
    def test_a_row_says_how_many_turns(self, max_turns, expected):
        assert len(play(task_of("gsm8k_multi_turn", max_turns=max_turns), *["?"] * 10)) == expected

    @pytest.mark.parametrize("max_turns", [0, -1, "many", 2.5, True, [3], float("inf"), float("nan")])
    def test_a_senseless_number_of_turns_is_a_fault(self, max_turns):
        with raises_code("environment", "max_turns"):
            make("gsm8k_multi_turn", task_of("gsm8k_multi_turn", max_turns=max_turns))


class TestAime:
    @pytest.mark.parametrize(
        ("action", "truth", "reward"),
        [
            ("so\nAnswer: 204", "204", 1.0),
            ("Answer: $\\boxed{204}$", "204", 1.0),
            ("answer : 1,204", "1204", 1.0),
            ("Answer: x = 204 <end>", "204", 1.0),
            ("Answer: 1\nAnswer: 204", "204", -1.0),
            ("Answer: 204\nAnswer: $204$", "204", 1.0),
            ("Answer: 204\nAnswer: 1", "204", -1.0),
            ("\\boxed{204}", "204", -1.0),
            ("204", "204", -1.0),
            ("Answer: 204" + " " * 300, "204", 1.0),
            ("Answer: 204" + " so" * 100, "204", -1.0),
            ("Answer: \\frac12", "\\frac{1}{2}", 1.0),
            ("Answer: 30 degrees", "30", 1.0),
            ("Answer: 204", 204, 1.0),
            ("Answer: 204", 204.0, 1.0),
        ],
    )
    def test_the_last_answer_is_normalised_and_compared(self, action, truth, reward):
        (step,) = play(task_of("aime", truth), action)
        assert (step.reward, step.done, step.info["success"]) == (reward, True, reward == 1.0)


@pytest.fixture
def change_worker(tmp_path, monkeypatch):
    """Replaces the SQL worker by one with a lower limit, so that a test need not use much of it."""

    def change(limit: str, lower: str) -> None:
        file, program = tmp_path / "worker.py", Path(sql_worker.__file__).read_text()
        assert limit in program
        file.write_text(program.replace(limit, lower))
        monkeypatch.setattr(text2sql, "workers", ProgramPool(str(file), "SQLite", "", ("-I", "-S")))

    return change


class TestText2Sql:
    def test_to_the_letter_of_skyrl_gym_a_thought_may_come_after_the_solution(self, ask):
        late = "<solution>SELECT name FROM pet WHERE age IN (5, 3)</solution><think>t</think>"
        assert [rewards(ask(strict=strict), late) for strict in (False, True)] == [[1.0], [-1.0]]

    def test_queries_are_tried_and_the_solution_is_compared_by_its_rows(self, ask):
        steps = play(
            ask(),
            "<think>look</think><sql>SELECT * FROM pet ORDER BY age DESC</sql>",
            "<think>so</think><solution>SELECT name FROM pet WHERE age IN (5, 3) ORDER BY 1</solution>",
        )
        assert "name | age\nMia | 5\nRex | 3\nTom | NULL\n<reminder>You have 4 turns left" in shown(steps[0])
        assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]
        assert steps[-1].info["success"]
        assert steps[-1].info["metrics"] == {"turns": 2, "sql_errors": 0}

    @pytest.mark.parametrize(
        ("solution", "reward", "why"),
        [
            ("SELECT name FROM pet", 0.0, "not expected: Tom"),
            ("SELECT name FROM pet WHERE age = 5", 0.0, "1 of 2 rows are missing"),
            ("SELEC", 0.0, "syntax error"),
            ("", 0.0, "no query"),
            ("-- nothing", 0.0, "no query"),
            ("DROP TABLE pet", 0.0, "readonly"),
            ("SELECT '\udc80'", 0.0, "surrogates"),
            ("SELECT '\0'", 0.0, "null character"),
            ("SELECT 1; SELECT 2", 0.0, "one statement"),
            ("<sql>SELECT 1</sql>", -1.0, "format"),
        ],
    )
    def test_a_wrong_solution_says_why(self, ask, solution, reward, why):
        (step,) = play(ask(), f"<think>t</think><solution>{solution}</solution>")
        assert (step.reward, step.done, step.truncated) == (reward, True, False)
        assert why in step.info["explanation"]

    @pytest.mark.parametrize(
        "transcript",
        [
            ["<solution>SELECT 1</solution>"],  # no thought
            ["<think>t</think><solution>SELECT 1</solution><solution>SELECT 1</solution>"],
            ["<think>t</think><solution>SELECT 1</solution></solution>"],
            ["<think>t</think></solution>SELECT 1<solution>"],
            ["<think>t</think><sql>SELECT 1</sql>", "<solution>SELECT 1</solution>"],  # none after the observation
            ["<think>t</think><solution><think>nested</think>SELECT 1</solution>"],
        ],
    )
    def test_a_broken_format_costs_one(self, ask, transcript):
        assert rewards(ask("SELECT 1"), *transcript)[-1] == -1.0

    def test_no_solution_at_the_last_turn_is_truncated(self, ask):
        steps = play(ask(max_turns=2), "<sql>SELECT 1</sql>", "<sql>SELECT 1</sql>", "never")
        assert [step.reward for step in steps] == [0.0, -1.0]
        assert steps[-1].truncated

    @pytest.mark.parametrize(
        "sql",
        [
            "DELETE FROM pet",
            "DROP TABLE pet",
            "UPDATE pet SET age = 1",
            "INSERT INTO pet VALUES ('x', 1) RETURNING name",
            "PRAGMA query_only = OFF",
            "PRAGMA journal_mode = WAL",
            "ATTACH '{folder}/other.sqlite' AS other",
            "ATTACH 'file:{folder}/other.sqlite?mode=rwc' AS other",
            "VACUUM INTO '{folder}/copy.sqlite'",
            "SELECT load_extension('x')",
        ],
    )
    def test_sql_that_writes_or_leaves_the_file_has_no_effect(self, ask, database, sql):
        before = database.read_bytes()
        (step,) = play(ask(), f"<sql>{sql.format(folder=database.parent)}</sql>")
        assert "Error executing SQL" in shown(step)
        assert str(database.parent) not in shown(step)
        assert database.read_bytes() == before
        assert [file.name for file in database.parent.iterdir()] == ["pets.sqlite"]

    @pytest.mark.parametrize("sql", ["pragma TABLE_INFO(pet)", "SELECT * FROM json_each('[7]')", "EXPLAIN SELECT 1"])
    def test_sql_that_only_reads_is_allowed(self, ask, sql):
        assert "Error" not in shown(play(ask(), f"<sql>{sql}</sql>")[0])

    def test_a_query_without_end_is_stopped(self, ask, monkeypatch):
        monkeypatch.setattr("treetune.tasksets.text2sql.TRY_SECONDS", 0.3)
        monkeypatch.setattr("treetune.tasksets.text2sql.JUDGE_SECONDS", 0.3)
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
        first, second = play(ask(), f"<sql>{endless}</sql>", f"<think>t</think><solution>{endless}</solution>")
        assert "0.3 seconds" in shown(first)
        assert "0.3 seconds" in second.info["explanation"]

    UNINTERRUPTIBLE = "SELECT instr(zeroblob(9000000), zeroblob(4500000) || x'01')"
    SORT = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000000) "
        "SELECT i FROM n ORDER BY hex(randomblob(500))"
    )

    def test_a_query_that_cannot_be_interrupted_is_killed_and_others_go_on(self, ask, monkeypatch, change_worker):
        change_worker("GRACE_SECONDS = 1.0", "GRACE_SECONDS = 0.1")
        monkeypatch.setattr("treetune.tasksets.text2sql.TRY_SECONDS", 0.2)
        monkeypatch.setattr("treetune.tasksets.text2sql.JUDGE_SECONDS", 0.2)
        first, second, third = play(
            ask(),
            f"<sql>{self.UNINTERRUPTIBLE}</sql>",
            "<think>t</think><sql>SELECT 7</sql>",
            f"<think>t</think><solution>{self.UNINTERRUPTIBLE}</solution>",
        )
        assert "no end after 0.2 seconds" in shown(first)
        assert "Error" not in shown(second)
        assert (third.reward, third.info["metrics"]["sql_errors"]) == (0.0, 1)

    def test_a_ground_truth_that_cannot_be_interrupted_is_a_fault(self, ask, monkeypatch, change_worker):
        change_worker("GRACE_SECONDS = 1.0", "GRACE_SECONDS = 0.1")
        monkeypatch.setattr("treetune.tasksets.text2sql.JUDGE_SECONDS", 0.2)
        with raises_code("environment", "reward_spec.ground_truth"):
            play(ask(self.UNINTERRUPTIBLE), "<think>t</think><solution>SELECT 1</solution>")

    def test_a_sort_has_a_limit_of_memory_and_writes_no_files(self, ask, monkeypatch, tmp_path, change_worker):
        change_worker("HEAP, MEMORY, LARGEST_FILE = 512 << 20", "HEAP, MEMORY, LARGEST_FILE = 16 << 20")
        monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
        (step,) = play(ask(), f"<sql>{self.SORT}</sql>")
        assert "over 16 MB of memory" in shown(step)
        workers = text2sql.workers.idle[os.getpid()]
        assert len(workers) == 1  # it goes on
        assert "temp" not in " ".join(map(os.readlink, Path(f"/proc/{workers[0].pid}/fd").iterdir()))

    @pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), 9)"])
    def test_no_process_is_left_behind(self, database, end):
        code = (
            "import os, sys\nfrom treetune import Task, make\n"
            "task = Task(prompt='?', env_class='text2sql', reward_spec={'ground_truth': 'SELECT 1'},"
            " extra_info={'db_path': sys.argv[1]})\n"
            "environment = make('text2sql', task)\n"
            "from treetune.tasksets.text2sql import workers\n"
            f"print(*(one.pid for many in workers.idle.values() for one in many), flush=True)\n{end}\n"
        )
        ran = subprocess.run([sys.executable, "-c", code, database], capture_output=True, text=True)
        (pid,) = ran.stdout.split()
        status = Path(f"/proc/{pid}/status")
        until = time.monotonic() + 30
        while status.exists() and "(zombie)" not in status.read_text():
            assert time.monotonic() < until
            time.sleep(0.01)

    @pytest.mark.parametrize(
        "sql",
        [
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, hex(zeroblob(1000)) FROM n",
            "SELECT hex(zeroblob(4000000)), hex(zeroblob(400))",
            "SELECT hex(zeroblob(2000000000))",
            "SELECT " + ", ".join(["hex(zeroblob(400))"] * 500),
        ],
    )
    def test_a_flood_of_rows_or_characters_is_cut(self, ask, sql):
        assert len(shown(play(ask(), f"<sql>{sql}</sql>")[0])) < 20_000

    def test_a_ground_truth_that_does_not_run_is_a_fault(self, ask):
        with raises_code("environment", "reward_spec.ground_truth", "nowhere"):
            play(ask("SELECT * FROM nowhere"), "<think>t</think><solution>SELECT 1</solution>")

    @pytest.mark.parametrize(
        ("extra", "why"),
        [
            ({"db_id": "cats"}, "no such database"),
            ({"db_id": "../pets"}, "db_id"),
            ({"db_id": None}, "db_id"),
            ({"data": "spyder"}, "did you mean 'spider'"),
        ],
    )
    def test_a_database_that_is_not_there_is_a_fault(self, ask, extra, why):
        with pytest.raises(EnvironmentFault, match=why):
            make("text2sql", ask(**extra))

    def test_a_folder_that_nobody_named_is_a_fault(self, ask, monkeypatch):
        monkeypatch.delenv("TREETUNE_TEXT2SQL_DB")
        with raises_code("environment", "TREETUNE_TEXT2SQL_DB"):
            make("text2sql", ask())

    def test_a_file_that_is_no_database_is_a_fault(self, ask, database):
        database.write_text("nothing of the kind" * 100)
        with raises_code("environment", "pets.sqlite"):
            make("text2sql", ask())

    def test_a_database_that_breaks_under_way_is_a_fault_and_no_observation(self, ask, database):
        environment = make("text2sql", ask())
        database.unlink()
        with raises_code("environment", "pets.sqlite"):
            asyncio.run(environment.step(Action.of("<sql>SELECT * FROM pet</sql>")))

    def test_the_data_source_or_the_row_itself_says_where_it_is(self, ask, database, monkeypatch):
        solution = "<think>t</think><solution>SELECT name FROM pet WHERE age > 2</solution>"
        as_in_the_seed = Task(
            prompt="?",
            data_source="spider",
            env_class="text2sql",
            reward_spec={"ground_truth": "SELECT name FROM pet WHERE age > 2"},
            extra_info={"db_id": "pets"},
        )
        assert rewards(as_in_the_seed, solution) == [1.0]
        monkeypatch.delenv("TREETUNE_TEXT2SQL_DB")
        assert rewards(ask(db_path=str(database)), solution) == [1.0]
        assert rewards(ask(db_path=str(database.parent.parent), data=None), solution) == [1.0]

    def test_the_same_database_is_used_from_many_threads_at_once(self, ask):
        async def together() -> list[Step]:
            environments = [make("text2sql", ask(max_turns=20)) for _ in range(20)]
            look = Action.of("<think>t</think><sql>SELECT * FROM pet</sql>")
            for _ in range(5):
                await asyncio.gather(*(call(e.step, look) for e in environments))
            done = Action.of("<think>t</think><solution>SELECT name FROM pet WHERE age > 2</solution>")
            return await asyncio.gather(*(call(e.step, done) for e in environments))

        assert [step.reward for step in asyncio.run(together())] == [1.0] * 20


class TestSearch:
    def test_documents_are_found_and_the_answer_is_normalised(self, corpus):
        steps = play(
            task_of("search", corpus=str(corpus)), "<search>capital of France</search>", "<answer>The paris!</answer>"
        )
        assert shown(steps[0]).startswith(
            '\n<information>{"result": "Doc 1: France\\nThe capital of France is Paris.\\n'
        )
        assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]
        assert steps[-1].info["metrics"] == {"turns": 2, "searches": 1, "search_failures": 0}

    @pytest.mark.parametrize("truth", ["Paris", ["Lutetia", "Paris"], {"target": "Paris"}, {"target": ["Paris"]}])
    def test_the_ground_truth_is_a_text_a_list_or_a_target(self, truth):
        assert rewards(task_of("search", truth), "<answer>paris</answer>") == [1.0]

    @pytest.mark.parametrize("truth", [{"targets": ["Paris"]}, [5], {"target": []}, 5])
    def test_any_other_ground_truth_is_a_fault(self, truth):
        with pytest.raises(EnvironmentFault):
            make("search", task_of("search", truth))

    @pytest.mark.parametrize(
        ("actions", "reward"),
        [
            (["<answer>Rome</answer><answer>Paris</answer>"], 0.0),
            (["<answer>Paris</answer><answer>Rome</answer>"], 0.0),
            (["<answer>Paris</answer><answer>paris.</answer>"], 1.0),
            (["<think><answer>Rome</answer></think><answer>Paris</answer>"], 1.0),
            (["<answer>Paris"], 0.0),
            (["</answer>Paris<answer>"], 0.0),
            (["<answer><answer>Paris</answer></answer>"], 0.0),
            (["<answer>Paris", "<answer>Paris</answer>"], 1.0),
            (["<answer>Par", "is</answer>"], 0.0),
            (["Paris", "<answer>Paris</answer>"], 1.0),
        ],
    )
    def test_one_answer_counts(self, actions, reward):
        assert rewards(task_of("search"), *actions)[-1] == reward

    @pytest.mark.parametrize(
        ("actions", "reward"),
        [
            (["<answer>Rome</answer><answer>Paris</answer>"], 1.0),
            (["<answer>Paris</answer><answer>Rome</answer>"], 0.0),
            (["<answer>Paris", "<answer>Paris</answer>"], 0.0),  # the first tag was never closed
        ],
    )
    def test_to_the_letter_of_skyrl_gym_the_last_answer_counts(self, actions, reward):
        assert rewards(task_of("search", strict=False), *actions)[-1] == reward

    def test_an_answer_that_a_document_holds_is_not_the_policys(self, corpus):
        _, last = play(task_of("search", corpus=str(corpus)), "<search>zebras</search>", "<search>zebras</search>")
        assert (last.reward, last.done, last.truncated, last.info["answer"]) == (0.0, True, True, None)

    def test_nothing_found_is_said(self, corpus):
        (step,) = play(task_of("search", corpus=str(corpus)), "<search>qwerty</search>")
        assert "No search results found." in shown(step)

    def test_nothing_to_search_is_a_fault_only_once_it_is_searched(self):
        assert rewards(task_of("search"), "<answer>Paris</answer>") == [1.0]
        with raises_code("environment", "TREETUNE_SEARCH_CORPUS"):
            play(task_of("search"), "<search>x</search>")

    @pytest.mark.parametrize(
        "content", [None, "", "{", "[1]", '{"id": 1}', '{"contents": 5}', '{"title": 1, "text": "x"}', "\xff"]
    )
    def test_a_corpus_that_cannot_be_read_is_a_fault(self, tmp_path, content):
        file = tmp_path / "bad.jsonl"
        if content is not None:
            file.write_text(content, encoding="latin-1")
        with raises_code("environment", "bad.jsonl"):
            play(task_of("search", corpus=str(file)), "<search>x</search>")

    def test_the_index_is_built_once_and_again_when_the_file_changes(self, corpus):
        first = load_index(corpus)
        assert load_index(corpus) is first
        corpus.write_text('{"contents": "new"}\n')
        assert load_index(corpus).search("new", 3) == ["new"]

    def test_rarer_words_and_shorter_documents_win(self, tmp_path):
        file = tmp_path / "c.jsonl"
        texts = ["the cat", "the dog", "the the the bird in the house of the cat", "the fox"]
        file.write_text("".join(json.dumps({"contents": text}) + "\n" for text in texts))
        index = Index(file)
        assert index.search("the cat", 2) == [texts[0], texts[2]]
        assert index.search("FOX", 3) == ["the fox"]
        assert index.search("", 3) == []

    def test_a_row_cannot_name_an_address(self, corpus, monkeypatch):
        monkeypatch.setenv("TREETUNE_SEARCH_CORPUS", str(corpus))
        (step,) = play(task_of("search", search_url="http://127.0.0.1:9/"), "<search>France</search>")
        assert "Paris" in shown(step)


class TestRetriever:
    """A search server, from good to dead."""

    def search(self, monkeypatch: pytest.MonkeyPatch, handler: Any, url: str | None = None) -> tuple[Step, Step]:
        async def episode() -> tuple[Step, Step]:
            app = web.Application()
            app.router.add_post("/retrieve", handler)
            async with TestServer(app) as server:
                monkeypatch.setenv("TREETUNE_SEARCH_URL", url or str(server.make_url("/retrieve")))
                environment = make("search", task_of("search"))
                try:
                    found = await environment.step(Action.of("<search> where \udc80 </search>"))
                    return found, await environment.step(Action.of("<answer>Paris</answer>"))
                finally:
                    await environment.close()

        return asyncio.run(episode())

    def test_documents_come_from_the_server(self, monkeypatch):
        asked = []

        async def handler(request: web.Request) -> web.Response:
            asked.append(await request.json())
            return web.json_response({"result": [[{"document": {"contents": " Café "}, "score": 1.0}]]})

        found, last = self.search(monkeypatch, handler)
        assert asked == [{"query": "where \udc80", "topk": 3, "return_scores": True}]
        assert shown(found) == '\n<information>{"result": "Doc 1: Café\\n"}</information>\n'
        assert (last.reward, last.info["metrics"]["search_failures"]) == (1.0, 0)

    def test_a_server_that_stumbles_is_asked_again(self, monkeypatch):
        statuses = iter([503, 500, 200])

        async def handler(request: web.Request) -> web.Response:
            return web.json_response({"result": []}, status=next(statuses))

        found, last = self.search(monkeypatch, handler)
        assert "No search results found." in shown(found)
        assert last.info["metrics"]["search_failures"] == 0

    @pytest.mark.parametrize(
        ("body", "status", "why"),
        [
            ("{}", 503, "status 503"),
            ("{}", 404, "status 404"),
            ("<html>", 200, "not JSON"),
            ("[]", 200, "no documents"),
        ],
    )
    def test_a_server_that_fails_is_told_to_the_policy_and_counted(self, monkeypatch, body, status, why):
        async def handler(request: web.Request) -> web.Response:
            return web.Response(text=body, status=status)

        found, last = self.search(monkeypatch, handler)
        assert "Search error: " in shown(found)
        assert why in shown(found)
        assert (last.reward, last.info["metrics"]["search_failures"]) == (1.0, 1)

    def test_a_server_that_is_not_there_or_never_answers_costs_little_time(self, monkeypatch):
        monkeypatch.setattr("treetune.tasksets.search.TIMEOUT", 0.2)

        async def handler(request: web.Request) -> web.Response:
            await asyncio.sleep(3)
            return web.Response()

        for url in (None, "http://127.0.0.1:9/retrieve"):
            began = time.monotonic()
            found, _ = self.search(monkeypatch, handler, url)
            assert "the search server failed (no answer)" in shown(found)
            assert "127.0.0.1" not in shown(found)
            assert time.monotonic() - began < 10

    def test_an_address_that_is_none_is_a_fault(self, monkeypatch):
        async def handler(request: web.Request) -> web.Response:
            return web.Response()

        with pytest.raises(EnvironmentFault, match="is not an address"):
            self.search(monkeypatch, handler, "nowhere:80")


class Rows(Taskset):
    """Tasks that name their environment."""

    def load_tasks(self) -> list[Task]:
        return [task_of(name) for name in TRUTHS]


class Says:
    """A policy that always says the same."""

    name = "says"

    def __init__(self, text: str) -> None:
        self._text = text

    async def complete(self, request: Request) -> Completion:
        return Completion(text=self._text)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("says", "outcome", "reward"), [("#### 5", Outcome.COMPLETED, 1.0), ("#### 4", Outcome.TRUNCATED, 0.2)]
)
def test_a_rollout_tells_an_end_by_the_rules_from_one_by_the_turns(says, outcome, reward):
    trace = asyncio.run(run_rollout(Rows(), task_of("gsm8k_multi_turn"), Says(says)))
    assert (trace.outcome, trace.success, round(trace.reward, 9)) == (outcome, reward == 1.0, reward)


def test_a_fault_is_the_environments_in_the_trace():
    trace = asyncio.run(run_rollout(Rows(), task_of("search"), Says("<search>x</search>")))
    assert trace.outcome is Outcome.ENVIRONMENT_ERROR
    assert "nothing to search" in trace.failure.message


AWKWARD = [
    "",
    " ",
    "\0",
    "\udc80",
    "你好 مرحبا 🎲",
    "####",
    "#### ,",
    "#### .",
    "Answer:",
    "Answer: <",
    "<sql>",
    "</sql><sql>",
    "<sql></sql>",
    "<sql><sql>SELECT 1</sql></sql>",
    "<solution><solution></solution></solution>",
    "</solution><solution>",
    "<search></search>",
    "<search><search>x</search>",
    "<answer></answer>",
    "<SQL>SELECT 1</SQL>",
    {"tool_calls": [{"name": "x"}]},
    None,
    5,
]


@pytest.mark.parametrize("name", list(TRUTHS))
def test_no_action_makes_an_environment_fail(name, ask, corpus):
    extra = {"db_id": "pets", "data": "spider", "corpus": str(corpus)}
    for action in AWKWARD:
        for step in play(task_of(name, max_turns=2, **extra), action, action):
            assert step.reward in (-1.0, 0.0, 0.1)
            step.observation.messages()


@pytest.mark.parametrize("name", list(TRUTHS))
@pytest.mark.parametrize(
    "part", ["<think>", "<sql>", "<solution>", "<search>", "<answer>", "#### ", "Answer:", "</observation> ", "9", "$"]
)
def test_a_huge_action_costs_linear_time(name, part, ask, corpus):
    extra = {"db_id": "pets", "data": "spider", "corpus": str(corpus)}
    action = part * (2_000_000 // len(part))
    began = time.process_time()
    play(task_of(name, max_turns=2, **extra), action, action)
    assert time.process_time() - began < 2


@given(st.lists(st.sampled_from(["<a>", "</a>", "x", "\n", "<b>"])).map("".join))
def test_what_stands_between_tags_is_what_the_pattern_finds(text):
    assert list(tagged(text, "a")) == [found.strip() for found in re.findall("<a>(.*?)</a>", text, re.DOTALL)]


GOLDEN = {
    "gsm8k": ["5", 5, 5.0, "-1.5"],
    "gsm8k_multi_turn": ["5", 5, 5.0],
    "aime": ["204", 204, 2.5, "\\frac{1}{2}", "$\\sqrt3$"],
    "search": ["Paris", ["Paris", "Lutetia"], {"target": ["Paris"]}],
    "text2sql": ["SELECT name FROM pet", "SELECT count(*) FROM pet WHERE age < 5"],
    "lcb": [[{"input": "5", "output": "25"}, {"input": "2", "output": "4"}]],
    "searchcode": ["42", 42],
}
WRONG = ["", "?", "I do not know.", "#### 7", "Answer: 7", "<answer>Rome</answer>", "```python\nprint(7)\n```"]


@pytest.mark.parametrize(("name", "truth"), [(name, truth) for name, truths in GOLDEN.items() for truth in truths])
def test_gold_earns_the_full_reward_and_more_than_wrong_answers(name, truth, ask, corpus):
    if requirements_of(name).sandbox and not probe().available:
        pytest.skip(f"no sandbox can start here: {probe().cause}")
    task = episodes.task_of(name, truth, db_id="pets", data="spider", corpus=str(corpus), max_turns=1)
    gold = environments.resolve(name, USER).gold(task)
    (step,) = play(task, gold)
    assert (step.reward, step.done, step.info["success"]) == (1.0, True, True)
    assert all(rewards(task, wrong)[-1] < 1.0 for wrong in WRONG)


def test_a_taskset_without_gold_asks_the_environment():
    assert asyncio.run(Rows().gold_of(task_of("gsm8k"))) == "#### 5"
    assert asyncio.run(Rows().gold_of(Task(prompt="?"))) is None


@pytest.mark.parametrize("name", list(GOLDEN))
@pytest.mark.parametrize("truth", [None, [], True])
def test_a_ground_truth_that_is_none_has_no_gold(name, truth):
    assert environments.resolve(name, USER).gold(Task(prompt="?", reward_spec={"ground_truth": truth})) is None


def test_gold_of_several_turns_is_one_action_each():
    task = AlphabetSort()[0]
    gold = AlphabetSortEnvironment.gold(task)
    assert len(gold) == len(task.rounds)
    assert sum(rewards(task, *gold)) == 1.0


@pytest.mark.parametrize("turns", [1, 3, 6, 7, 10, 49])
def test_a_perfect_episode_of_parts_is_one_and_a_success(turns):
    """Six times 1/6 is 0.9999999999999999, and 49 times 1/49 is not 1 even where the sum is rounded once."""
    taskset = AlphabetSort(AlphabetSortConfig(turns=turns, names_per_turn=1, num_tasks=1))
    task = taskset[0]
    gold = AlphabetSortEnvironment.gold(task)

    async def play_all(actions: list[str]) -> Any:
        episode = await Episode.start(taskset, task)
        for action in actions:
            await episode.step(action)
        return episode.result

    perfect, wrong = asyncio.run(play_all(gold)), asyncio.run(play_all([*gold[:-1], "?"]))
    assert (perfect.reward, perfect.success, sum(perfect.rewards)) == (1.0, True, 1.0)
    assert (wrong.reward, wrong.success) == ((turns - 1) / turns, False)


def test_a_gold_that_cannot_be_matched_earns_nothing():
    """So that a check of gold answers finds it."""
    task = task_of("gsm8k", "1,000", strict=False)
    assert rewards(task, environments.resolve("gsm8k", USER).gold(task)) == [0.0]


@pytest.mark.parametrize("name", list(TRUTHS))
def test_an_episode_starts_with_the_prompt(name, ask):
    task = ask() if name == "text2sql" else task_of(name)
    assert asyncio.run(call(make(name, task).start)) == [{"role": "user", "content": "?"}]


class TestMathVerify:
    """Answers that mean the same, where a row asks for it."""

    @staticmethod
    def reward(truth: Any, answer: str, method: str | None = "math_verify") -> float:
        spec = {"ground_truth": truth, "method": method}
        return rewards(Task(prompt="?", env_class="aime", reward_spec=spec), f"so\nAnswer: {answer}")[-1]

    @pytest.mark.parametrize(
        ("truth", "answer", "reward"),
        [
            ("\\frac{1}{2}", "0.5", 1.0),
            ("\\frac{1}{2}", "$\\dfrac{2}{4}$", 1.0),
            ("0.5", "\\boxed{\\frac{1}{2}}", 1.0),
            ("\\sqrt{8}", "2 \\sqrt 2", 1.0),
            ("\\{1, 2\\}", "\\{2, 1\\}", 1.0),
            ("(1, 2)", "(2, 1)", -1.0),
            (2.5, "5/2", 1.0),
            ("204", "204.0", 1.0),
            ("204", "205", -1.0),
            ("204", "\\text{nonsense", -1.0),
            ("204", "x" * 250, -1.0),
            ("204", "\udc80", -1.0),
        ],
    )
    def test_expressions_are_compared_by_meaning(self, truth, answer, reward):
        pytest.importorskip("math_verify")
        assert self.reward(truth, answer) == reward

    @pytest.mark.parametrize("method", [None, "rule"])
    def test_other_rows_are_compared_as_ever(self, method):
        assert self.reward("\\sqrt{8}", "2\\sqrt{2}", method) == -1.0
        assert self.reward("\\frac{1}{2}", "\\frac12", method) == 1.0
        assert self.reward("\\frac{1}{2}", "0.5", method) == 1.0

    def test_without_the_mark_nothing_counts(self):
        task = Task(prompt="?", env_class="aime", reward_spec={"ground_truth": "204", "method": "math_verify"})
        assert rewards(task, "\\boxed{204}") == [-1.0]

    @pytest.mark.thorough
    def test_an_expression_without_end_is_given_up_and_others_go_on(self, monkeypatch):
        pytest.importorskip("math_verify")
        monkeypatch.setattr("treetune.tasksets.math_verifier.SECONDS", 1.0)
        endless = "9^{9^{9^9}}"

        async def together() -> list[float]:
            spec = {"ground_truth": "\\sqrt{8}", "method": "math_verify"}
            task = Task(prompt="?", env_class="aime", reward_spec=spec)
            answers = [endless, "2\\sqrt{2}", endless, "2\\sqrt{2}", "3\\sqrt{2}"]
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            steps = await asyncio.gather(*(episodes.episode(task, f"Answer: {answer}") for answer in answers))
            ticking.cancel()
            assert ticks > 10  # the loop was never blocked for long
            return [step.reward for (step,) in steps]

        assert asyncio.run(together()) == [-1.0, 1.0, -1.0, 1.0, -1.0]

    def test_a_worker_that_is_killed_is_replaced(self):
        pytest.importorskip("math_verify")
        assert self.reward("\\sqrt{8}", "2\\sqrt{2}") == 1.0
        for worker in math_verifier.workers().idle[os.getpid()]:
            worker.kill()
            worker.wait()
        assert [self.reward("\\sqrt{8}", f"{2 * n}\\sqrt{{2}}/{n}") for n in range(2, 8)] == [1.0] * 6

    def test_without_the_package_it_is_said(self, monkeypatch):
        monkeypatch.setattr(math_verifier, "find_spec", lambda name: None)
        with raises_code("missing-extra", "'treetune[math]'"):
            self.reward("204", "204")
        assert self.reward("204", "204", "rule") == 1.0
