"""An Environment implements the rules of one episode: `start`, `step`, `close`.

    class Guess(Environment):
        def step(self, action):
            return Step("try again", reward=float(action.text == self.task.ground_truth), done=True)

Methods may be `async`; synchronous ones run in a thread. The `info` of a step may have `answer`, `explanation`,
`metrics` (named numbers) and `success`, which are recorded in the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.message import Message, text_of
from treetune.config.plugins import environments
from treetune.config.trust import Origin, current_origin
from treetune.core.agent import AgentMachine, AgentNeeds
from treetune.core.contract import Contract
from treetune.core.score import Rewarding, finite, judge
from treetune.core.task import Task, fill_form
from treetune.core.tool import Gold, read_tools
from treetune.errors import EnvironmentFault, TreetuneError, UsageError

if TYPE_CHECKING:
    import asyncio

    from treetune.core.trace import Trace

ContentType = Literal["text", "json", "messages", "image"]
_CONTENT_TYPES: tuple[Any, ...] = get_args(ContentType)


class _Content(msgspec.Struct, frozen=True):
    type: ContentType = "text"
    content: Any = ""

    def __post_init__(self) -> None:
        if self.type not in _CONTENT_TYPES:  # `type` is the first argument and easy to forget
            name = type(self).__name__
            raise UsageError(
                f"{name}({self.type!r:.60}): the first argument is the type, one of {', '.join(_CONTENT_TYPES)}",
                remedy=f"write {name}.of(...), or {name}(content=...)",
            )


class Observation(_Content, frozen=True):
    """What the policy observes: text, JSON, chat messages or an image (a URL or data URL)."""

    @classmethod
    def of(cls, value: Any) -> Observation:
        """A string becomes text, a list of messages becomes messages, other mappings and lists become JSON, None is
        empty."""
        if isinstance(value, Observation):
            return value
        if value is None or isinstance(value, str):
            return cls("text", value or "")
        if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value):
            return cls("messages", value)
        if isinstance(value, dict | list | int | float):
            return cls("json", value)
        remedy = "return text, chat messages, JSON or an Observation"
        raise EnvironmentFault(f"an observation cannot be a {type(value).__name__}", remedy=remedy)

    def messages(self) -> list[Message]:
        """The observation as chat messages."""
        if self.type == "messages":
            return list(self.content)
        if self.type == "image":
            return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": self.content}}]}]
        text = self.content if self.type == "text" else msgspec.json.encode(self.content).decode()
        return [{"role": "user", "content": text}] if text else []


class Action(_Content, frozen=True):
    """The policy's action: its text, or structured content for environments that accept it."""

    @classmethod
    def of(cls, value: Any) -> Action:
        """A string becomes text, `{"type", "content"}` is used as given, and any other value becomes JSON."""
        if isinstance(value, Action):
            return value
        if isinstance(value, dict) and value.keys() == {"type", "content"} and value["type"] in _CONTENT_TYPES:
            return cls(value["type"], value["content"])
        return cls("text", value) if isinstance(value, str) else cls("json", value)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else msgspec.json.encode(self.content).decode()


class Step(msgspec.Struct):
    """An environment's response to an action."""

    observation: Any = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = {}
    truncated: bool = False
    """Whether a limit (too many turns) ended the episode rather than its rules, as in Gymnasium."""
    calls: list[ToolCall] = []
    """The tool calls of the action, with their results; set by the episode, or by the code that ran them."""

    def __post_init__(self) -> None:
        self.observation = Observation.of(self.observation)
        if self.truncated:
            self.done = True


def check_step(owner: Any, step: Any) -> Step:
    """Validate the step of an environment, or of a tool given by name, and return a copy. An environment may return any
    value, and may return the same object each time."""
    if not isinstance(step, Step):
        where = owner if isinstance(owner, str) else f"{type(owner).__name__}.step()"
        raise EnvironmentFault(f"{where} returned a {type(step).__name__}", remedy="return a Step")
    if step.done not in (True, False) or step.truncated not in (True, False) or not isinstance(step.info, dict):
        where = owner if isinstance(owner, str) else f"{type(owner).__name__}.step()"
        raise EnvironmentFault(
            f"{where} returned done={step.done!r:.60}, truncated={step.truncated!r:.60}, info={step.info!r:.60}",
            remedy="`done` and `truncated` are True or False, and `info` a dict",
        )
    reward = finite(step.reward, "reward")
    return Step(step.observation, reward, bool(step.done), step.info, bool(step.truncated), step.calls)


class Rendered(msgspec.Struct, frozen=True):
    """A trace as its environment renders it for a person."""

    text: str
    kind: Literal["text", "shell", "markdown"] = "text"
    """`text` keeps lines and spaces, as a board needs; `shell` is a shell session with its commands behind `$`."""


class Environment:
    """The rules of one episode. An instance is made for one task and used once.

        class Guess(Environment):
            def start(self):
                return "Guess a number from 1 to 10."

            def step(self, action):
                if action.text == self.task.ground_truth:
                    return Step("right", reward=1.0, done=True)
                return Step("try again")

    A task names its environment: `Task(env_class="guess.py:Guess", ground_truth="7")`. A model may call the methods
    that are marked with `@tool`; answers without tool calls go to `step`.
    """

    CONTRACT: ClassVar[Contract] = Contract()
    """The contract of its episodes, the same everywhere: the turn limit, the discount and other terms."""

    REQUIREMENTS: ClassVar[TaskRequirements | None] = None
    """The requirements on its tasks; None if nothing is checked."""

    ANSWER: ClassVar[Any] = None
    """The place of the answer in an action, an `AnswerFormat`, for its sentence in prompts (`instruct`), `gold` and
    `validate`. None: nothing is declared."""

    MULTI_TURN: ClassVar[bool] = False
    """Whether episodes have several turns, which single-turn trainers refuse. A contract's `max_turns` also sets it."""

    WRONG: ClassVar[dict[str, str]] = {}
    """Wrong answers by description. `validate --gold` checks that none of them earns as much as a gold answer."""

    RAW_CALLS: ClassVar[bool] = False
    """Whether answers with tool calls go to `step` unchanged, because the environment runs the calls itself. The model
    still sees its `@tool` methods, and the tools in `raw_tools`."""

    raw_tools: Sequence[dict[str, Any]] = ()
    """Further schemas in OpenAI's form, used with `RAW_CALLS`; set once the environment has started."""

    tool_methods: ClassVar[tuple[str, ...]] = ()
    """The methods marked with `@tool`."""

    agent: AgentNeeds | None = None
    """What the agent that plays the episode needs of its machine; None if no agent plays it. Set before `start`."""

    task: Task

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "TOOLS" in vars(cls):
            remedy = "mark the methods that a model may call with @treetune.tool"
            raise UsageError(f"{cls.__name__}.TOOLS has no effect: tools are methods", remedy=remedy)
        cls.tool_methods = read_tools(cls, Environment)

    @classmethod
    def gold(cls, task: Task) -> Gold:
        """Return the solution that earns the full reward, made from the task alone: one answer, or a list with one
        action a turn. An action is text or tool calls. None if unknown. By default the ground truth, if `ANSWER`
        declares a form."""
        return fill_form(cls.ANSWER, task.ground_truth)

    @classmethod
    def render(cls, trace: Trace) -> Rendered | str | None:
        """Return what a person sees next to the messages of a trace, such as a board, a path or a shell session. It
        gets only the trace, which may have ended at any turn or failed. None adds nothing."""
        return None

    def __init__(self, task: Task) -> None:
        self.task = task

    def start(self) -> Any:
        """Return the first observation. By default, or if it returns None, that is the task's prompt."""
        return self.task.messages

    def step(self, action: Action) -> Any:
        """Return a `Step` for the policy's action."""
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def problem(self) -> str:
        """Return the problem for an agent, which has a loop of its own: without this environment's rules for actions.
        By default, the text of the task's prompt."""
        texts = [text_of(message.get("content")) for message in self.task.messages]
        if None in texts:
            raise EnvironmentFault("the prompt has images, and an agent is given text")
        return "\n\n".join(filter(None, texts))

    @property
    def machine(self) -> AgentMachine | None:
        """The machine that an agent acts on, once the episode has started."""
        return None

    def hand_in(self, answer: str) -> Any:
        """Return the action that hands in what an agent answered. It must end the episode. Override it if episodes have
        several turns."""
        return answer

    def close(self) -> Any:
        """Release resources. Always called, whatever happened in the episode."""


class SingleTurn(Environment):
    """One answer, scored by the taskset's `reward`. The environment of tasks without an `env_class`."""

    CONTRACT = Contract(max_turns=1)

    def __init__(self, task: Task, taskset: Rewarding) -> None:
        super().__init__(task)
        self._taskset = taskset

    async def step(self, action: Action) -> Step:
        score = await judge(self._taskset, self.task, action.text)
        info = {"answer": score.answer, "explanation": score.explanation, "metrics": score.metrics}
        known = {key: value for key, value in info.items() if value not in (None, {})}
        return Step(reward=score.reward, done=True, info=known)


def register(*, id: str, entry_point: str | type) -> None:
    """Register an environment under an id in this process. Environments of skyrl-gym (`skyrl_gym.Env`) work too."""
    environments.register(id, entry_point)


def make(env_class: str, task: Task, **settings: Any) -> Environment:
    """Make the environment of a task, from a registered id, installed package, `module:Class` or `file.py:Class`."""
    cls = environments.resolve(env_class, current_origin())
    try:
        environment = cls(task, **settings)
    except TypeError as error:
        if _takes(cls, task, settings):
            raise  # raised by its own code
        remedy = "write def __init__(self, task) and call super().__init__(task) in it; or begin an episode in start()"
        raise EnvironmentFault(f"{env_class} cannot be created for a task: {error}", remedy=remedy) from None
    if not isinstance(environment, Environment):
        raise EnvironmentFault(f"{env_class} is not an Environment", remedy="subclass treetune.Environment")
    return environment


def _takes(cls: type, task: Task, settings: dict[str, Any]) -> bool:
    import inspect  # only needed for the error message

    try:
        inspect.signature(cls).bind(task, **settings)
    except TypeError:
        return False
    return True


Sink = Callable[[str], object]

_shown: ContextVar[tuple[asyncio.AbstractEventLoop, Sink] | None] = ContextVar("partial observations", default=None)


def show(text: str) -> None:
    """Send a part of the observation to the watchers of this step."""
    if (watched := _shown.get()) is None:
        return
    import asyncio

    loop, sink = watched
    if asyncio._get_running_loop() is loop:
        sink(text)
    else:
        loop.call_soon_threadsafe(sink, text)


def show_to(sink: Sink) -> None:
    """Send what is shown in this context to `sink` from now on, on the running event loop."""
    import asyncio  # imported here because reading and checking rows does not need it

    _shown.set((asyncio.get_running_loop(), sink))


class Kind(StrEnum):
    """Kinds of ground truth that people write."""

    TEXT = "text"
    NUMBER = "number"
    LIST = "list"
    """Several acceptable answers."""
    CASES = "cases"
    """Test cases: a list of mappings with `input` and `output`."""
    MAPPING = "mapping"


class Stored(StrEnum):
    """How trainers' own environments read the ground truth from a row."""

    TEXT = "text"
    """As text: a number would always score 0 there."""
    TARGET = "target"
    """As `{"target": [...]}`."""
    JSON = "json"
    """As JSON in a string."""
    AS_IS = "as is"


class TaskRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's requirements on its tasks, set as its `REQUIREMENTS`: ground truths and keys."""

    about: str
    """A one-line description of the environment."""
    takes: tuple[Kind, ...]
    """The kinds of ground truth it accepts."""
    stored: Stored = Stored.AS_IS
    column: Literal["reward_spec", "reward_model"] = "reward_spec"
    """The column that SkyRL's environment of this name reads."""
    needs: dict[str, str] = {}
    """Further keys that a row must have, and what they mean."""
    choices: dict[str, tuple[str, ...]] = {}
    """The allowed values of some of those keys."""
    pattern: str | None = None
    """A pattern that the whole stored text must match, or no answer can be right."""
    rewards: str = "0 or 1"
    """The rewards that it gives."""
    sandbox: bool = False
    """Whether episodes run code that the policy wrote and so need a sandbox; `treetune.sandbox.probe` looks for one."""

    def problem(self, truth: Any) -> str | None:
        """Return what is wrong with a ground truth, or None."""
        kind = kind_of(truth)
        if kind is None:
            return "is missing" if truth is None else f"is a {type(truth).__name__}"
        if kind in self.takes or (kind is Kind.CASES and Kind.LIST in self.takes):
            return None
        return f"is {kind.value}, expected {' or '.join(self.takes)}"

    def is_free(self, truth: Any) -> bool:
        """Whether an empty answer matches a ground truth, in its stored form."""
        return False

    def encode(self, truth: Any, task: Task | None = None) -> Any:
        """Convert a natural ground truth to the form that trainers' environments read; it may depend on the task."""
        if self.stored is Stored.TEXT and kind_of(truth) is Kind.NUMBER:
            # 42.0 becomes "42": environments compare text, and an answer says 42.
            return str(int(truth)) if isinstance(truth, float) and truth.is_integer() else str(truth)
        if self.stored is Stored.TARGET and not (isinstance(truth, dict) and "target" in truth):
            return {"target": truth if isinstance(truth, list) else [truth]}
        if self.stored is Stored.JSON and not isinstance(truth, str):
            return msgspec.json.encode(truth).decode()
        return truth


def kind_of(truth: Any) -> Kind | None:
    if isinstance(truth, str):
        return Kind.TEXT
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return Kind.NUMBER
    if isinstance(truth, list) and truth:
        cases = all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in truth)
        return Kind.CASES if cases else Kind.LIST
    return Kind.MAPPING if isinstance(truth, dict) and truth else None


_DATA = Origin("data")


def requirements_of(env_class: str | None) -> TaskRequirements | None:
    """The requirements of an environment with a registered id; None if it has none."""
    return getattr(_registered(env_class), "REQUIREMENTS", None)


def turns_of(env_class: str | None) -> int:
    """The turn limit that an environment with a registered id declares; 1 if it declares none."""
    return getattr(_registered(env_class), "CONTRACT", Contract()).max_turns or 1


def _registered(env_class: str | None) -> type | None:
    """The environment with a registered id. Files and modules are never loaded for this, because reading and writing
    data must not run code that the data names."""
    if env_class is None or ":" in env_class:
        return None
    try:
        return environments.resolve(env_class, _DATA)
    except TreetuneError:
        return None
