"""Environments that TRL plays by itself, and which way of playing tasks is chosen; TRL's own trainer in slow tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging

import pytest
import task_servers
import tool_shop
import venvs
from pictures import png
from raising import raises_code
from serving import until

from treetune import Environment, Step, Task, Taskset, tool
from treetune.chat.images import image_part, to_url
from treetune.errors import UsageError
from treetune.system import threads
from treetune.tasksets.target import load_taskset
from treetune.trainers.trl import TrlTasks


class Counter(Environment):
    """Counts, and scores what is said at the end."""

    open: list[Environment] = []

    def start(self):
        Counter.open.append(self)
        self.count = 0
        return f"Count to {self.task.ground_truth}."

    @tool
    def add(self, by: int = 1) -> int:
        """Counts on. by: how far."""
        if by < 0:
            raise RuntimeError("broken") if by == -1 else ValueError("no")
        self.count += by
        return self.count

    def step(self, action):
        if action.text == "break":
            raise RuntimeError("broken")
        return Step(reward=float(action.text == str(self.count) == self.task.ground_truth), done=action.text != "more")

    def close(self):
        Counter.open.remove(self)


class Counting(Taskset):
    def load_tasks(self):
        for number in range(3):
            yield Task(prompt="-", reward_spec={"ground_truth": str(number)})

    def environment(self, task):
        return Counter(task)


class Mixed(Counting):
    """The last task has no environment, and no tools."""

    def environment(self, task):
        return Counter(task) if task.ground_truth != "2" else super(Counting, self).environment(task)

    def reward(self, task, answer):
        return 1.0


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    Counter.open.clear()
    yield
    ended(lambda: not Counter.open)


def ended(condition):
    """What is ended without waiting ends soon."""
    threads.run_in_background(asyncio.wait_for(until(condition), 30))


def answer(text):
    return [{"role": "assistant", "content": text}]


def tools_of(environment):
    """As TRL finds them."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    names = [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]
    return {name: getattr(environment, name) for name in names}


def test_tools_are_methods_with_signatures_and_docstrings(tmp_path):
    with TrlTasks(tool_shop.write(tmp_path)) as tasks:
        made = tasks.environment_factory
        assert str(inspect.signature(made.search)) == "(self, *, query: str, limit: int = 5)"
        assert inspect.getdoc(made.search) == "Find items.\n\nArgs:\n    query: what to look for.\n    limit:"
        assert str(inspect.signature(made.buy)) == "(self, *, item: str)"
        assert set(tools_of(made())) == {"search", "buy"}


def test_what_a_model_is_told_of_a_tool_is_its_own_schema(tmp_path):
    with TrlTasks(tool_shop.write(tmp_path)) as tasks:
        told = tools_of(tasks.environment_factory())
        episode = threads.run_in_background(tasks._episodes.start(0))
        assert [told[schema["function"]["name"]] for schema in episode.tools] == episode.tools
        assert told["search"]["function"]["parameters"]["properties"]["limit"]["default"] == 5
        threads.run_in_background(episode.cancel())


def test_a_story_that_is_called_has_the_rewards_and_results_of_eval(tmp_path):
    target = tool_shop.write(tmp_path)
    shown = []
    with TrlTasks(target) as tasks:
        environment = tasks.environment_factory()
        (row,) = tasks.dataset(1, first=1)
        assert environment.reset(**row) is None
        tools = tools_of(environment)
        for said in tool_shop.STORY:
            for name, arguments in said.calls:
                if name in tools:  # TRL itself answers calls of what is not there
                    shown.append(tools[name](**arguments))
        assert environment.get_reward() == 1.0
        assert tools["search"](query="x") == "Error: not run: the episode has ended"
    expected = [text for turn in tool_shop.expected(target) for text in turn.shown]
    assert shown == [text for text in expected if "serach" not in text]


def test_wrong_arguments_are_told_as_everywhere():
    with TrlTasks(Counting()) as tasks:
        environment = tasks.environment_factory()
        environment.reset(task_index=2)
        assert environment.add(bye=2) == "Error: add: there is no argument 'bye'; did you mean 'by'?"
        assert "given: 'x'" in environment.add(by="x")
        assert environment.add(by=2) == "2"
        assert tasks.reward([], [answer("2")], environments=[environment]) == [1.0]


def test_the_opening_is_shown_once():
    with TrlTasks(Counting()) as tasks:
        rows = list(tasks.dataset())
        environment = tasks.environment_factory()
        assert environment.reset(**rows[1]) is None  # its prompt is the opening
        before = [{"role": "system", "content": "Be brief."}, *rows[1]["prompt"]]
        assert environment.reset(**{**rows[1], "prompt": before}) is None
        assert environment.reset(task_index=1) == "Count to 1."  # TRL makes an empty prompt of none
        empty = [{"role": "user", "content": ""}]
        assert environment.reset(task_index=1, prompt=empty) == "Count to 1."
        with pytest.raises(UsageError, match="begins differently"):
            environment.reset(**{**rows[1], "task_index": 2})
        with pytest.raises(UsageError, match="which task it belongs to"):
            environment.reset(prompt=empty)


def test_the_last_answer_is_scored_by_the_reward_function_and_counted_once():
    with TrlTasks(Counting(), turn_discount=0.5) as tasks:
        made = tasks.environment_factory
        environments = [made() for _ in range(4)]
        for environment in environments:
            environment.reset(task_index=2)
            environment.add(by=2)
        cut_off = [{"role": "assistant", "content": "", "tool_calls": [{}]}]
        said = [
            [*cut_off, {"role": "tool", "content": "2"}, *answer("2")],
            answer("3"),
            cut_off,
            answer("break"),
        ]
        metrics = {}
        given = {"environments": environments, "log_metric": metrics.__setitem__}
        assert tasks.reward([], said, **given) == [0.25, 0.0, 0.0, None]
        own = {"tool_calls": 1.0, "tool_errors": 0.0, "success": 1 / 3, "truncated": 0.0, "raw_reward": 1 / 3}
        assert metrics == {"task_server_failure": 0.25, "num_turns": 4 / 3, **own}
        assert [environment.get_reward() for environment in environments] == [None] * 4
        assert not Counter.open


def test_what_is_said_after_the_end_is_no_turn(tmp_path):
    def calls(*names):
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name}} for name in names]}

    with TrlTasks(tool_shop.write(tmp_path), turn_discount=0.5) as tasks:
        environment = tasks.environment_factory()
        environment.reset(task_index=1)
        environment.search(query="red")
        environment.search(query="red")
        environment.buy(item="red 1")
        environment.search(query="blue")  # not run
        said = [calls("search", "serach", "search"), calls("serach"), calls("buy"), calls("search"), *answer("Done.")]
        assert tasks.reward([], [said], environments=[environment]) == [0.5**3]


def test_without_the_reward_function_an_answer_that_would_be_scored_is_not_guessed():
    with TrlTasks(Counting()) as tasks:
        environment = tasks.environment_factory()
        environment.reset(task_index=2)
        with raises_code("usage", "reward_funcs=tasks.reward"):
            environment.get_reward()
        assert not Counter.open


def test_an_answer_that_goes_on_is_told_of(caplog):
    with TrlTasks(Counting()) as tasks:
        environment = tasks.environment_factory()
        environment.reset(task_index=2)
        assert tasks.reward([], [answer("more")], environments=[environment]) == [0.0]
        assert "pass rollout_func" in caplog.text


def test_episodes_end_with_the_next_one_and_with_what_plays_them():
    tasks = TrlTasks(Counting())
    environment = tasks.environment_factory()
    environment.reset(task_index=1)
    environment.reset(task_index=2)
    ended(lambda: len(Counter.open) == 1)
    del environment
    gc.collect()
    ended(lambda: not Counter.open)
    kept = tasks.environment_factory()
    kept.reset(task_index=1)
    tasks.close()
    assert not Counter.open


def test_an_episode_that_is_lost_has_no_reward(caplog):
    server = task_servers.Scripted(features=["turn", "request_id"])
    threads.run_in_background(server.start())
    tool = {"type": "function", "function": {"name": "count", "description": "", "parameters": {"type": "object"}}}
    server.tools = [tool]
    with TrlTasks(server.url, patience=0.2) as tasks:
        made = tasks.environment_factory
        lost, never = made(), made()
        lost.reset(task_index=5)
        threads.run_in_background(server.stop())
        assert lost.count() == "Error: not run: the environment is gone"
        assert never.reset(task_index=6) is None
        assert never.count() == "Error: not run: the environment is gone"
        assert lost.get_reward() is None
        assert tasks.reward([], [answer("x")], environments=[never]) == [None]
        assert tasks.failures == 2


def test_pictures_that_a_tool_gives_are_given_to_trl_as_it_takes_them():
    pytest.importorskip("PIL")

    class Looks(Environment):
        @tool
        def look(self) -> Step:
            """Looks."""
            return Step([{"type": "text", "text": "It is this:"}, image_part(to_url(png((255, 0, 0))))])

    class One(Taskset):
        def load_tasks(self):
            yield Task(prompt="-")

        def environment(self, task):
            return Looks(task)

    with TrlTasks(One()) as tasks:
        environment = tasks.environment_factory()
        environment.reset(task_index=0)
        text, picture = environment.look()
    assert text == {"type": "text", "text": "It is this:"}
    assert (picture["type"], picture["image"].getpixel((0, 0))[:3]) == ("image", (255, 0, 0))


def test_tasks_with_different_tools_are_different_environments():
    with TrlTasks(Mixed()) as tasks:
        rows = tasks.dataset()
        assert rows["environment"] == ["add", "add", "no-tools"]
        made = tasks.environment_factory
        assert set(made) == {"add", "no-tools"}
        assert tools_of(made["no-tools"]()) == {}
        environment = made["no-tools"]()
        assert environment.reset(**{key: value for key, value in rows[2].items() if key != "environment"}) is None
        assert tasks.reward([], [answer("x")], environments=[environment]) == [1.0]
        with pytest.raises(UsageError, match="different tools"):
            environment.reset(task_index=0)


def test_tools_that_cannot_be_methods_are_refused():
    class Resets(Environment):
        @tool
        def reset(self) -> str:
            """Begins anew."""
            return ""

    class One(Taskset):
        def load_tasks(self):
            yield Task(prompt="-")

        def environment(self, task):
            return Resets(task)

    with TrlTasks(One()) as tasks, raises_code("usage", "reset", "rollout_func"):
        tasks.environment_factory  # noqa: B018
    with TrlTasks("arithmetic") as tasks, pytest.raises(UsageError, match="no task has tools"):
        tasks.environment_factory  # noqa: B018


class Pictures(Taskset):
    def load_tasks(self):
        parts = [{"type": "text", "text": "Which colour?"}, image_part(to_url(png((255, 0, 0))))]
        yield Task(prompt=[{"role": "user", "content": parts}], reward_spec={"ground_truth": "red"})

    def reward(self, task, answer):
        return 1.0


class Begun(Taskset):
    def load_tasks(self):
        yield Task(prompt=[{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is"}])

    def reward(self, task, answer):
        return 1.0


@pytest.mark.parametrize(
    ("tasks", "way", "why"),
    [
        ("arithmetic", "reward_funcs", "each task takes one answer"),
        ("alphabet-sort", "rollout_func", "several turns"),
        (Counting, "rollout_func", "tools"),
        (Mixed, "rollout_func", "tools"),
        (Pictures, "reward_funcs", "images"),
        (Begun, "rollout_func", "the beginning of an answer"),
    ],
)
def test_what_fits_the_tasks_is_chosen_and_told(tasks, way, why, caplog):
    with TrlTasks(tasks if isinstance(tasks, str) else tasks()) as tasks, caplog.at_level(logging.WARNING):
        given = tasks.trainer_arguments(1)
    assert set(given) - {"train_dataset"} == {"reward_funcs", way}
    assert f"by its argument {way}" in caplog.text
    assert why in caplog.text
    assert given["reward_funcs"] == tasks.reward
    assert len(given["train_dataset"]) == 1


def test_another_way_can_be_asked_for(caplog):
    with TrlTasks(Counting()) as tasks:
        assert tasks.trainer_arguments(using="environment_factory")["environment_factory"] is tasks.environment_factory
        assert set(tasks.trainer_arguments(using="reward_funcs")) == {"train_dataset", "reward_funcs"}
        with raises_code("usage", "reward_funcs", "rollout_func", "environment_factory"):
            tasks.trainer_arguments(using="rollouts")
        assert "by its argument" not in caplog.text
        assert len(load_taskset("arithmetic")[0].messages) == 1


@pytest.mark.slow
def test_its_own_trainer_plays_our_environments():
    tests = venvs.ROOT / "tests" / "support"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(tests), "TRL_EXPERIMENTAL_SILENCE": "1"}
    venvs.run(venvs.venv(*venvs.TRL), "-m", "pytest", *options, tests / "trl_environments_side.py", **environment)
