"""Tools: what a model may call, and what it is told."""

from __future__ import annotations

import asyncio
import enum
import time
from typing import Annotated, Any, Literal

import msgspec
import pytest
from raising import raises_code

from treetune import Environment, InvalidAction, Limits, Outcome, Score, Step, Task, Taskset, run_rollout, tool
from treetune.chat.calls import read_calls
from treetune.config.plugins import tools as registry
from treetune.core.environment import Observation
from treetune.core.mixture import Mixture
from treetune.core.policy import Completion, Request
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource, find_tools, message_of_action
from treetune.core.trace import Trace, decode_trace, encode_trace
from treetune.errors import ToolError
from treetune.play.episode import Episode
from treetune.play.toolbox import MOST_AT_ONCE, MOST_CHARACTERS, render


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(msgspec.Struct):
    name: str
    price: float = 1.0


class Tree(msgspec.Struct):
    name: str
    parts: list[Tree] = []


class Shop(Environment):
    @tool
    async def search(self, query: str, limit: int = 5) -> list[str]:
        """Find items. query: what to look for."""
        return [f"{query} {number}" for number in range(limit)]

    @tool(final=True)
    def buy(self, item: str) -> Step:
        """Buy an item, which ends it."""
        return Step("bought", reward=float(item == self.task.ground_truth))


class Tasks(Taskset):
    """One task, played by an environment of the given class."""

    def __init__(self, environment: type[Environment] = Shop, **task: Any) -> None:
        super().__init__()
        self._environment = environment
        self._task = {"prompt": "Buy red 1.", "reward_spec": {"ground_truth": "red 1"}, **task}

    def load_tasks(self) -> list[Task]:
        return [Task(**self._task)]

    def environment(self, task: Task) -> Environment:
        return self._environment(task)


class Script:
    """Says one thing after the other; the last again and again."""

    name = "script"

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.requests: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.requests.append(request)
        answer = self._answers[min(request.turn, len(self._answers) - 1)]
        if isinstance(answer, str):
            return Completion(answer)
        message = answer if isinstance(answer, dict) and "role" in answer else message_of_action(answer)
        return Completion(message=message, finish_reason="tool_calls")

    async def close(self) -> None: ...


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"tool": name, "arguments": arguments}


def raw(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def function(name: Any, arguments: Any, id: str = "c") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def play(taskset: Taskset, *answers: Any, **options: Any) -> Trace:
    return asyncio.run(run_rollout(taskset, taskset[0], Script(*answers), **options))


def told(trace: Trace, turn: int = 1) -> list[Any]:
    """What the results of the calls of the turn before say."""
    shown = trace.turns[turn].observed if turn < len(trace.turns) else trace.final
    return [message["content"] for message in shown if message["role"] == "tool"]


def schema_of(marked: Any) -> dict[str, Any]:
    return Tool.of(marked).schema["function"]


# The schema


def test_a_function_becomes_a_schema_by_its_signature_and_docstring() -> None:
    assert schema_of(Shop.search) == {
        "name": "search",
        "description": "Find items.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to look for."},
                "limit": {"type": "integer", "default": 5},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }


def test_enums_literals_structs_and_optionals_are_in_the_schema_without_references() -> None:
    @tool
    def order(
        item: Item,
        colour: Colour,
        size: Literal["s", "m"] = "m",
        notes: list[str] | None = None,
        count: Annotated[int, msgspec.Meta(ge=1, description="how many")] = 1,
    ) -> None: ...

    properties = schema_of(order)["parameters"]["properties"]
    assert properties["item"]["properties"]["name"] == {"type": "string"}
    assert properties["item"]["required"] == ["name"]
    assert properties["colour"] == {"title": "Colour", "enum": ["blue", "red"]}
    assert properties["size"]["enum"] == ["m", "s"]
    assert properties["notes"] == {
        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
        "default": None,
    }
    assert (properties["count"]["minimum"], properties["count"]["description"]) == (1, "how many")
    assert schema_of(order)["parameters"]["required"] == ["item", "colour"]
    assert "$ref" not in msgspec.json.encode(schema_of(order)).decode()


def test_a_type_that_holds_itself_keeps_its_reference() -> None:
    @tool
    def grow(tree: Tree) -> None: ...

    parameters = schema_of(grow)["parameters"]
    assert parameters["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert parameters["$defs"]["Tree"]["properties"]["parts"]["items"] == {"$ref": "#/$defs/Tree"}


@pytest.mark.parametrize(
    "doc",
    [
        "Add numbers. left: the first. right: the second.",
        "Add numbers.\n\nleft: the first.\nright: the second.",
        "Add numbers.\n\nArgs:\n    left (int): the\n        first.\n    right: the second.\n\nReturns:\n    left: all",
        "Add numbers.\n\n:param left: the first.\n:param int right: the second.\n:returns: their sum",
        "Add numbers.\n\n- `left`: the first.\n- `right`: the second.",
    ],
)
def test_a_docstring_tells_of_the_function_and_of_each_parameter(doc: str) -> None:
    def add(left: int, right: int) -> int:
        return left + right

    add.__doc__ = doc
    schema = schema_of(tool(add))
    assert schema["description"] == "Add numbers."
    about = {name: one["description"] for name, one in schema["parameters"]["properties"].items()}
    assert about == {"left": "the first.", "right": "the second."}


def test_a_signature_that_no_schema_can_tell_is_refused_where_it_is_written() -> None:
    with raises_code("usage", "'query'"):

        @tool
        def untyped(query): ...  # type: ignore[no-untyped-def]

    with raises_code("usage", "*words"):

        @tool
        def variadic(*words: str) -> None: ...

    with raises_code("usage", "@tool", "staticmethod"):
        tool(staticmethod(len))  # type: ignore[call-overload]
    with raises_code("usage", "0 seconds"):
        tool(timeout=0)(lambda: None)


def test_a_type_that_json_does_not_have_is_refused_where_the_tool_is_built() -> None:
    @tool
    def odd(thing: complex) -> None: ...

    with raises_code("usage", "`schema_hook`", "'complex'"):
        Tool.of(odd)


def test_tools_as_an_attribute_are_an_error() -> None:
    with raises_code("usage", "TOOLS"):
        type("Old", (Environment,), {"TOOLS": []})


@pytest.mark.parametrize(
    ("base", "name", "what"),
    [
        *((Taskset, name, "a method of Taskset") for name in ("count", "source", "draw", "check", "gold", "tools_for")),
        *((Taskset, name, "an attribute of Taskset") for name in ("scorer", "config_type", "seed", "config", "name")),
        (Environment, "step", "a method of Environment"),
        (Environment, "task", "an attribute of Environment"),
        (ToolSource, "open", "a method of ToolSource"),
    ],
)
def test_a_tool_that_would_take_the_place_of_a_method_is_refused_where_it_is_written(
    base: type, name: str, what: str
) -> None:
    def look_up(self: Any, word: str) -> str:
        return word

    with raises_code("usage", f"'{name}'", what) as refused:
        type("Own", (base,), {name: tool(look_up)})
    assert refused.value.remedy == f'rename it, or write @tool(name="{name}") above a method with another name'
    named: Any = type("Own", (base,), {"look_up": tool(name=name)(look_up)})
    assert find_tools(named) == ("look_up",)


def test_a_tool_without_self_is_refused_where_it_is_written() -> None:
    with raises_code("usage", "'temperature'") as refused:

        class Weather(Taskset):
            @tool
            def temperature(city: str) -> int:  # type: ignore[misc]
                return 3

    assert refused.value.remedy == "write def temperature(self, city), or @staticmethod above @tool"
    with raises_code("usage", "'now'"):

        class Clock(Environment):
            @tool
            def now() -> str:  # type: ignore[misc]
                return "noon"


def test_a_static_method_may_be_a_tool() -> None:
    class Fixed(Environment):
        @staticmethod
        @tool
        def temperature(city: str) -> str:
            return f"3 in {city}"

        @classmethod
        @tool
        def kind(cls) -> str:
            return cls.__name__

    trace = play(Tasks(Fixed), [call("temperature", city="Oslo"), call("kind")], "done")
    assert told(trace) == ["3 in Oslo", "Fixed"]


# The loop


def test_a_model_calls_tools_until_a_final_one_ends_the_episode() -> None:
    trace = play(Tasks(), call("search", query="red", limit=2), call("buy", item="red 1"))
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 1.0)
    assert trace.turns[1].observed == [
        {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": '["red 0","red 1"]'}
    ]
    assert [made.name for turn in trace.turns for made in turn.calls] == ["search", "buy"]
    assert trace.turns[0].calls[0].arguments == {"query": "red", "limit": 2}
    assert trace.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
    assert [schema["function"]["name"] for schema in trace.tools] == ["search", "buy"]
    assert decode_trace(encode_trace(trace)) == trace


def test_a_policy_is_given_the_schemas_with_every_request() -> None:
    script, taskset = Script(call("search", query="x"), call("buy", item="x")), Tasks()
    asyncio.run(run_rollout(taskset, taskset[0], script))
    assert [[one["function"]["name"] for one in request.tools] for request in script.requests] == [
        ["search", "buy"]
    ] * 2


def test_calls_of_one_answer_run_side_by_side_and_are_answered_in_their_order() -> None:
    class Meeting(Environment):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            self.both = asyncio.Barrier(2)

        @tool
        async def meet(self, name: str) -> str:
            await self.both.wait()  # alone it would wait for ever
            return name

    trace = play(Tasks(Meeting), [call("meet", name="a"), call("meet", name="b")], "done", limits=Limits(timeout=20))
    assert told(trace) == ["a", "b"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (function("serch", "{}"), "there is no tool 'serch'; did you mean 'search'?"),
        (function("search", "{}"), "the argument 'query' is missing"),
        (function("search", '{"query": 3}'), "the argument 'query': expected `str`, got `int`"),
        (function("search", '{"query": "x", "limt": 3}'), "there is no argument 'limt'; did you mean 'limit'?"),
        (function("search", '{"query": '), "the arguments are not JSON"),
        (function("search", "[1]"), "the arguments must be a JSON object"),
        (function("search", 7), "the arguments must be a JSON object"),
        (function("search", "[" * 100_000), "nested too deeply"),
        (function("search", '{"query": ' + '{"a":' * 5000 + "1" + "}" * 5001), ""),
        (function("search", '{"query": "\ud800"}'), ""),
        (function("search", "\x00\xff\udcff"), "the arguments are not JSON"),
        (function(None, "{}"), "does not name a function"),
        ({"id": "c"}, "does not name a function"),
        ("search", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_call_that_is_wrong_is_a_message_that_the_model_can_act_on(made: Any, says: str) -> None:
    trace = play(Tasks(), raw(made), call("buy", item="red 1"))
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 1.0), trace.failure
    (content,) = told(trace)
    assert says in content
    if says:
        assert content.startswith("Error: ")
        assert trace.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}
        assert trace.turns[0].calls[0].error is not None
    encode_trace(trace)


class Faulty(Environment):
    @tool
    def divide(self, by: int) -> float:
        return 1 / by

    @tool
    def leave(self) -> None:
        raise SystemExit(3)

    @tool
    async def cancel(self) -> None:
        raise asyncio.CancelledError

    @tool
    def refuse(self) -> None:
        raise ToolError("not today")

    @tool
    def fail(self) -> None:
        raise ConnectionError("the server is down")

    @tool(timeout=0.05)
    def hang(self) -> None:
        time.sleep(30)

    @tool(timeout=0.05)
    async def wait(self) -> None:
        await asyncio.sleep(30)

    @tool
    def cheat(self) -> Step:
        return Step(reward=float("nan"))

    @tool(final=True)
    def end(self) -> Any:
        return float("inf")

    @tool
    def insult(self) -> None:
        raise InvalidAction("that is not a move", reward=-1.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("divide", "Error: divide failed: ZeroDivisionError: division by zero"),
        ("leave", "Error: leave failed: RuntimeError: sys.exit(3) was called"),
        ("cancel", "Error: cancel failed: CancelledError"),
        ("refuse", "Error: refuse: not today"),
        ("fail", "Error: fail failed: ConnectionError: the server is down"),
        ("hang", "Error: hang did not answer within 0.05 seconds"),
        ("wait", "Error: wait did not answer within 0.05 seconds"),
        ("cheat", "Error: cheat failed: NotANumberError: reward must be finite, got nan"),
        ("end", "Error: end failed: NotANumberError: reward must be finite, got inf"),
    ],
)
def test_a_tool_that_fails_is_a_message_and_no_failed_rollout(name: str, says: str) -> None:
    arguments = {"by": 0} if name == "divide" else {}
    trace = play(Tasks(Faulty), call(name, **arguments), "I give up")
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 0.0), trace.failure
    assert told(trace)[0].startswith(says)
    assert trace.metrics["tool_errors"] == 1.0


def test_an_invalid_action_of_a_tool_ends_the_episode_with_its_reward() -> None:
    trace = play(Tasks(Faulty), call("insult"))
    assert (trace.outcome, trace.reward, trace.explanation) == (Outcome.COMPLETED, -1.0, "that is not a move")
    assert trace.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_missing_and_repeated_ids_are_filled_in_in_the_message_too() -> None:
    made = [function("search", '{"query": "a"}', id) for id in ("x", "x", "call_1")]
    del made[2]["id"]
    trace = play(Tasks(), raw(*made), "no")
    ids = [message["tool_call_id"] for message in trace.turns[1].observed]
    assert len(set(ids)) == 3
    assert ids[0] == "x"
    assert trace.turns[0].message is not None
    assert [one["id"] for one in trace.turns[0].message["tool_calls"]] == ids
    assert [one.id for one in read_calls([{}, {}])] == ["call_0", "call_1"]


def test_an_answer_makes_no_more_calls_than_one_may_and_each_is_answered() -> None:
    trace = play(Tasks(), [call("search", query="a")] * 1000, "no", limits=Limits(max_tool_calls=500))
    assert len(told(trace)) == 1000
    assert sum("at most 64 calls" in content for content in told(trace)) == 1000 - MOST_AT_ONCE
    assert trace.metrics == {"tool_calls": 64.0, "tool_errors": 936.0}


def test_an_episode_makes_no_more_calls_than_the_limit_and_whoever_goes_on_is_cut_short() -> None:
    trace = play(Tasks(), [call("search", query="a")] * 2, limits=Limits(max_tool_calls=3))
    assert (trace.outcome, trace.reward, len(trace.turns)) == (Outcome.TRUNCATED, 0.0, 3)
    assert "the 3 calls of this episode are used up" in told(trace, 2)[1]
    assert trace.metrics["tool_calls"] == 3.0


def test_whoever_answers_after_the_last_call_is_scored() -> None:
    limits = Limits(max_tool_calls=0)
    trace = play(Doubling(), call("double", number=4), "8", limits=limits)
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 1.0)


def test_a_round_of_tools_is_a_turn() -> None:
    trace = play(Tasks(), call("search", query="a"), limits=Limits(max_turns=2))
    assert (trace.outcome, len(trace.turns), trace.reward) == (Outcome.TRUNCATED, 2, 0.0)
    assert told(trace, 2)


def test_a_long_result_is_cut_and_says_so() -> None:
    shown = render("x" * (MOST_CHARACTERS + 5))
    assert shown.endswith(f"[cut: {MOST_CHARACTERS} of {MOST_CHARACTERS + 5} characters]")


def test_results_are_text_or_json_and_may_be_images() -> None:
    assert render("as it is") == "as it is"
    assert render(None) == ""
    assert render([Item("ball")]) == '[{"name":"ball","price":1.0}]'
    assert render({1, 2}) == "[1,2]"
    assert render(object).startswith('"<class')
    assert render("half \ud800") == "half \\ud800"
    assert render({"half": "\ud800"}) == '{"half":"\\\\ud800"}'
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert render(Observation("image", "data:image/png;base64,AAAA")) == [picture]
    assert render([{"type": "text", "text": "see"}, picture]) == [{"type": "text", "text": "see"}, picture]


def test_the_deadline_of_a_rollout_bounds_a_tool() -> None:
    class Slow(Environment):
        @tool
        async def wait(self) -> None:
            await asyncio.sleep(30)

    trace = play(Tasks(Slow), call("wait"), limits=Limits(timeout=0.2, timeout_reward=-0.5))
    assert (trace.outcome, trace.reward) == (Outcome.TIMEOUT, -0.5)


# Rewards


class Rewards(Environment):
    @tool
    def pay(self, amount: float) -> Step:
        return Step("paid", reward=amount, info={"metrics": {"paid": amount}})

    @tool(final=True)
    def number(self, reward: float) -> float:
        return reward

    @tool(final=True)
    def score(self, reward: float) -> Score:
        return Score(reward, answer="said", explanation="why", metrics={"own": 2.0})

    @tool(final=True)
    def nothing(self) -> None: ...


def test_a_final_tool_gives_a_step_a_score_or_the_reward() -> None:
    assert play(Tasks(Rewards), call("number", reward=0.25)).reward == 0.25
    scored = play(Tasks(Rewards), call("score", reward=0.5))
    assert (scored.reward, scored.answer, scored.explanation) == (0.5, "said", "why")
    assert scored.metrics == {"own": 2.0, "tool_calls": 1.0, "tool_errors": 0.0}
    assert play(Tasks(Rewards), call("nothing")).reward == 0.0


def test_a_step_of_a_tool_earns_a_reward_for_its_turn() -> None:
    trace = play(Tasks(Rewards), [call("pay", amount=0.1), call("pay", amount=0.2)], call("number", reward=0.5))
    assert [turn.reward for turn in trace.turns] == [pytest.approx(0.3), 0.5]
    assert trace.reward == pytest.approx(0.8)
    assert told(trace) == ["paid", "paid"]


def test_a_final_tool_is_called_after_the_others_and_only_one_ends_it() -> None:
    trace = play(Tasks(Rewards), [call("number", reward=1.0), call("number", reward=1.0), call("pay", amount=0.5)])
    assert (trace.reward, len(trace.turns)) == (1.5, 1)
    assert told(trace) == ["", "Error: not run: the episode has ended", "paid"]


def test_an_answer_without_a_call_ends_an_environment_that_has_no_step() -> None:
    trace = play(Tasks(Rewards), call("pay", amount=0.5), "thank you")
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 0.5)


def test_an_environment_that_has_a_step_gets_answers_without_calls() -> None:
    class Both(Shop):
        def step(self, action: Any) -> Step:
            return Step("go on", done=action.text == "stop")

    trace = play(Tasks(Both), "hello", call("search", query="a", limit=1), "stop")
    assert trace.outcome is Outcome.COMPLETED
    assert [turn.observed[0]["content"] for turn in trace.turns[1:]] == ["go on", '["a 0"]']
    assert trace.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_an_environment_may_run_its_calls_itself() -> None:
    class Raw(Environment):
        RAW_CALLS = True

        @tool
        def look(self) -> None:
            """Look."""

        def step(self, action: Any) -> Step:
            return Step(reward=float(action.content["tool_calls"][0]["function"]["name"] == "look"), done=True)

    trace = play(Tasks(Raw), call("look"))
    assert (trace.reward, trace.metrics, trace.turns[0].calls) == (1.0, {}, [])
    assert [schema["function"]["name"] for schema in trace.tools] == ["look"]


def test_calls_to_an_environment_without_tools_reach_it_as_they_are() -> None:
    class Plain(Environment):
        def step(self, action: Any) -> Step:
            return Step(reward=len(action.content["tool_calls"]), done=True)

    assert play(Tasks(Plain), [call("a"), call("b")]).reward == 2.0


# Tasksets, and tools by name


class Doubling(Taskset):
    def load_tasks(self) -> list[Task]:
        return [Task(prompt="Double 4.", reward_spec={"ground_truth": "8"})]

    @tool
    def double(self, number: int, task: Task) -> str:
        """Double a number. number: which one."""
        return f"{2 * number} for {task.prompt}"

    @tool(final=True)
    def submit(self, answer: str) -> str:
        return answer

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.ground_truth)

    def gold(self, task: Task) -> Any:
        return [call("double", number=4), task.ground_truth]


def test_a_taskset_offers_tools_and_scores_the_answer_without_a_call() -> None:
    trace = play(Doubling(), call("double", number=4), "8")
    assert (trace.reward, told(trace)) == (1.0, ["8 for Double 4."])
    assert "task" not in trace.tools[0]["function"]["parameters"]["properties"]
    assert play(Doubling(), call("double", number=4), "9").reward == 0.0


def test_what_a_final_tool_of_a_taskset_gives_is_the_answer() -> None:
    assert play(Doubling(), call("submit", answer="8")).reward == 1.0
    wrong = play(Doubling(), call("submit", answer="7"))
    assert (wrong.outcome, wrong.reward, wrong.metrics["tool_calls"]) == (Outcome.COMPLETED, 0.0, 1.0)


def test_the_tools_of_a_source_are_offered_in_a_mixture() -> None:
    mixture = Mixture.of([Doubling()], [1.0])
    assert play(mixture, call("double", number=4), "8").reward == 1.0


def test_a_task_and_a_config_name_tools() -> None:
    class Named(Tasks):
        def environment(self, task: Task) -> Environment:
            return Taskset.environment(self, task)

        def reward(self, task: Task, answer: str) -> float:
            return float(answer == "42")

    trace = play(Named(tools=["calculator"]), call("calculator", expression="6*7"), "42")
    assert (told(trace), trace.reward) == (["42"], 1.0)
    by_config = Doubling(TasksetConfig(tools=["calculator"]))
    assert [one["function"]["name"] for one in play(by_config, "8").tools] == ["double", "submit", "calculator"]
    with raises_code("unknown-name", "'calculator'"):
        Doubling(TasksetConfig(tools=["calculater"]))
    with raises_code("usage", "'calculator'"):
        Doubling(TasksetConfig(tools=[{"calculator": {"digits": 3}}]))
    with raises_code("usage", "'b'"):
        Doubling(TasksetConfig(tools=[{"a": {}, "b": {}}]))


def test_tools_are_part_of_the_uid_only_where_there_are_any() -> None:
    plain = Task(prompt="a")
    assert plain.uid == Task(prompt="a", tools=[]).uid
    assert plain.uid != Task(prompt="a", tools=["calculator"]).uid


def test_two_tools_of_one_name_are_an_error() -> None:
    trace = play(Tasks(Shop, tools=[f"{__name__}:search"]), "hello")
    assert trace.failure is not None
    assert "two tools called 'search'" in trace.failure.message


@tool
def search(query: str) -> str:
    return query


class Counter(ToolSource):
    """Is opened and closed with its episode."""

    opened: list[Counter] = []

    def __init__(self, task: Task, first: int = 0) -> None:
        super().__init__(task)
        self.count, self.closed = first, False

    async def open(self) -> list[Tool]:
        self.opened.append(self)
        return await super().open()

    @tool
    def count_on(self) -> int:
        self.count += 1
        return self.count

    async def close(self) -> None:
        self.closed = True


def test_a_source_of_tools_lives_for_one_episode() -> None:
    registry.register("test-counter", f"{__name__}:Counter")
    Counter.opened.clear()
    taskset = Doubling(TasksetConfig(tools=[{"test-counter": {"first": 4}}]))
    for _ in range(2):
        trace = play(taskset, call("count_on"), call("count_on"), "8")
        assert [told(trace, 1), told(trace, 2)] == [["5"], ["6"]]
    assert [one.closed for one in Counter.opened] == [True, True]
    wrong = Doubling(TasksetConfig(tools=[{"test-counter": {"wrong": 4}}]))
    with raises_code("usage", "test-counter"):
        asyncio.run(Episode.start(wrong, wrong[0]))


def test_scoring_again_runs_the_rules_and_takes_other_results_from_the_record() -> None:
    registry.register("test-counter-2", f"{__name__}:Counter")
    Counter.opened.clear()
    taskset = Doubling(TasksetConfig(tools=[{"test-counter-2": {"first": 4}}]))
    answers = ([call("count_on"), call("double", number=1), call("none")], "8")
    first = play(taskset, *answers)
    again = play(taskset, *answers, recorded=[turn.calls for turn in first.turns if turn.calls])
    assert len(Counter.opened) == 1
    assert again.turns[1].observed == first.turns[1].observed
    assert told(again)[:2] == ["5", "2 for Double 4."]
    assert (again.reward, again.metrics) == (first.reward, first.metrics)


def test_a_source_that_cannot_be_opened_fails_the_episode_and_is_closed() -> None:
    class Broken(Counter):
        async def open(self) -> list[Tool]:
            await super().open()
            raise ConnectionError("nobody there")

    registry.register("test-broken", Broken)
    Counter.opened.clear()
    trace = play(Doubling(TasksetConfig(tools=["test-broken"])), "8")
    assert trace.failure is not None
    assert (trace.outcome, trace.failure.phase) == (Outcome.ENVIRONMENT_ERROR, "start")
    assert [one.closed for one in Counter.opened] == [True]
