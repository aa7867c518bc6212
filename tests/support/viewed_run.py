"""A run with all that the viewer shows, the same at each call: tools, turns, images, reasoning, failures, tokens,
judges, and texts that mean harm.

    python tests/support/viewed_run.py FOLDER [--seed 0] [--model NAME] [--shift 0.1] [--tasks 200] [--rollouts 8]

Two of them with other seeds or shifts have the same tasks, and so can be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from viewed_tasks import MARK, MOVES, SOURCES, Viewed, ViewedConfig, board, make_task, route

from treetune.chat.calls import ToolCall
from treetune.chat.message import text_of
from treetune.chat.tokens import Tokens, TokenSequence
from treetune.core.contract import Limits
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.core.trace import Failure, Judgement, Outcome, Timing, Trace, Turn
from treetune.evaluation import EvalConfig, Evaluation, remember
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run
from treetune.runs.summary import Tally

MOST_TURNS = 7
LIMITS = Limits(max_turns=MOST_TURNS)
PLACE = f"{Path(__file__).with_name('viewed_tasks.py')}:Viewed"
FIRST_SECOND = 1_760_000_000.0

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><svg onload='window.hacked = 3'>",
    "[click](javascript:window.hacked=4) ![x](https://example.invalid/pixel.png) <https://example.invalid/>"
    " [data](data:text/html,<script>window.hacked=5</script>)",
    "</script></pre></textarea><iframe src=https://example.invalid/></iframe><base href=//example.invalid/>",
    "\u202egnihtyreve sesrever siht\u202c and \u05e9\u05dc\u05d5\u05dd, "
    "\u0645\u0631\u062d\u0628\u0627, \u2066isolated\u2069",
    "control: \x00 \x07 \x08 \x1b[31mred\x1b[0m \x7f \u0085 \u2028 \u2029 \ufeff, "
    "\ud83d half of a pair, \U0001f600 a whole one",
    "a line without an end: " + "abcdefghij" * 30_000,
    "$$\\frac{1}{$$ $\\undefined{x}$ $\\href{javascript:window.hacked=6}{x}$ $$" + "{" * 2000 + "$$ `` ``` ~~~",
    "> " * 300
    + "deep\n"
    + "* " * 300
    + "list\n"
    + "|a|b|\n|-|-|\n|<b>1</b>|`2`|\n"
    + "zalgo: H\u0300\u0301\u0302\u0303\u0304\u0305i",
)
"""What a model may say to whoever looks at it."""
FAILURES = (
    (Outcome.ENVIRONMENT_ERROR, "ZeroDivisionError", "division by zero", "environment", "viewed_tasks.py:41"),
    (Outcome.ENVIRONMENT_ERROR, "KeyError", "'goal'", "start", "viewed_tasks.py:63"),
    (Outcome.POLICY_ERROR, "PolicyError", "the endpoint answered 500: out of memory", "policy", ""),
    (Outcome.TIMEOUT, "TimeoutError", "the rollout took more than 60 s", "policy", ""),
    (Outcome.CANCELLED, "CancelledError", "somebody stopped it", "policy", ""),
)
MARKDOWN = (
    "## The plan\n\n1. Add the **first two** numbers.\n2. Add the third.\n\n"
    "| step | value |\n|---|---|\n| first | {a} |\n\n"
    "So $x = \\frac{{{a}}}{{1}}$ and\n\n$$\\sum_{{i=1}}^{{3}} x_i = {a}$$\n\n```python\nprint({a})\n```\n\n{mark} {a}"
)


class Made:
    """How one rollout went, drawn by its own random numbers."""

    def __init__(self, task: Task, rollout: int, seed: int, model: str, shift: float) -> None:
        self.random = Random(f"{seed} {task.idx} {rollout}")
        # A task's own level, the same in every run: some are never solved, some always.
        level = Random(f"level {task.idx}").random() * 1.6 - 0.3 + shift
        self.solves = self.random.random() < level
        self.task, self.rollout, self.number = task, rollout, task.idx * 131 + rollout
        self.trace = Trace(task=task, uid=task.uid, rollout=rollout, model=model)

    def play(self) -> Trace:
        getattr(self, f"_{self.task.data_source}")()
        trace, number = self.trace, self.number
        trace.reward = sum(turn.reward for turn in trace.turns)
        trace.metrics = {"format": float(bool(trace.answer)), "length": float(self._letters())}
        if self.task.data_source == "sums":
            trace.metrics["__proto__"] = self.random.random()
        if self.random.random() < 0.05:
            trace.outcome = Outcome.TRUNCATED
            trace.turns[-1].finish_reason = "length"
        self._add_oddities()
        trace.usage = Usage(sum(len(str(turn.observed)) for turn in trace.turns) // 4, self._letters() // 4)
        self._add_times()
        if number % 3 == 0 or number % 7 == 0:
            self._add_tokens()
        if self.task.idx % 29 == 7 or self.random.random() < 0.03:
            self._fail()
        if number % 101 == 0:
            trace.warnings = ["the answer was cut at 4,096 tokens"]
        return trace

    def _letters(self) -> int:
        return sum(len(text_of((turn.message or {}).get("content")) or "") for turn in self.trace.turns)

    # Sources

    def _sums(self) -> None:
        truth = int(self.task.ground_truth)
        said = str(truth if self.solves else truth + self.random.choice((-10, -1, 1, 7)))
        text = MARKDOWN.format(a=said, mark=MARK) if self.number % 2 else f"It is {said}.\n{MARK} {said}"
        reasoning = (
            f"I add slowly.\n\n{'Let me check that again. ' * self.random.randint(1, 40)}" if self.rollout % 2 else None
        )
        self._answer(self.task.messages, text, said, float(self.solves), reasoning=reasoning)

    def _tools(self) -> None:
        shown = self.task.messages
        truth = int(self.task.ground_truth)
        said = str(truth if self.solves else truth - 100)
        self.trace.tools = [CALCULATOR]
        for number in range(self.random.randint(1, 4)):
            wrong = number == 0 and self.random.random() < 0.3
            expression = "12 +* 3" if wrong else f"{truth - number} + {number}"
            result = "error: unexpected '*' at 5" if wrong else said
            call = {"name": "calculator", "arguments": f'{{"expression": "{expression}"}}'}
            message = {
                "role": "assistant",
                "content": "" if number % 2 else "I compute that.",
                "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
            }
            told = ToolCall(
                f"call_{number}",
                "calculator",
                {"expression": expression},
                result,
                0.01,
                "unexpected '*'" if wrong else None,
            )
            self.trace.turns.append(
                Turn(
                    observed=shown,
                    message=message,
                    info={"calls": number + 1},
                    finish_reason="tool_calls",
                    calls=[told],
                )
            )
            shown = [{"role": "tool", "tool_call_id": f"call_{number}", "name": "calculator", "content": result}]
        self._answer(shown, f"{MARK} {said}", said, float(self.solves))

    def _pictures(self) -> None:
        said = self.task.ground_truth if self.solves else "purple"
        self._answer(self.task.messages, f"I see one colour.\n\n{MARK} {said}", said, float(self.solves))

    def _walk(self) -> None:
        moves = route(self.task)
        if not self.solves:
            moves = [self.random.choice(["north", "west"]) for _ in range(MOST_TURNS)]
        at, goal = (0, 0), tuple(self.task.extra_info["goal"])
        shown = [*self.task.messages, {"role": "user", "content": board(at, goal)}]
        for move in moves:
            at = tuple(min(3, max(0, place + by)) for place, by in zip(at, MOVES[move], strict=True))
            there = at == goal
            info = {"at": list(at), "success": there, "explanation": "reached the goal" if there else "not yet there"}
            message = {"role": "assistant", "content": move}
            self.trace.turns.append(Turn(shown, message, 1.0 if there else 0.0, info, "stop"))
            shown = [{"role": "user", "content": board(at, goal)}]
        self.trace.final, self.trace.success = shown, self.solves
        self.trace.explanation = "reached the goal" if self.solves else "not yet there"
        if not self.solves:
            self.trace.outcome = Outcome.TRUNCATED

    def _essays(self) -> None:
        words = self.random.randint(150, 320) if self.solves else self.random.randint(1, 150)
        text = "# Euler\n\n$e^{i\\pi} + 1 = 0$\n\n" + "because it turns " * (words // 3)
        verdicts = ["good" if self.solves else "poor", "good" if self.random.random() < 0.85 else "poor"]
        self._answer(self.task.messages, text, None, min(1.0, len(text.split()) / 200))
        self.trace.judgements = [
            Judgement(
                model=f"judge-{which}",
                asked="clarity",
                prompt=f"Is this essay clear?\n\n<answer>\n{text[:400]}\n</answer>",
                answer=f"It reads {'well' if verdict == 'good' else 'badly'}.\nVERDICT: {verdict}",
                verdict={"clarity": verdict},
                cached=which == 2 and self.rollout == 0,
                usage=Usage(200 + len(text) // 4, 12),
                seconds=0.4 * which,
            )
            for which, verdict in enumerate(verdicts, 1)
        ]

    def _answer(self, shown, text, said, reward, reasoning=None) -> None:
        message = {"role": "assistant", "content": text}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        info = {"answer": said, "explanation": f"{said!r} against {self.task.ground_truth!r}"}
        self.trace.turns.append(Turn(shown, message, reward, info, "stop"))
        self.trace.answer, self.trace.explanation = said, info["explanation"]

    # What is odd about some

    def _add_oddities(self) -> None:
        trace, last = self.trace, self.trace.turns[-1]
        if self.task.idx % 17 == 3 and self.task.data_source != "walk":
            text = HOSTILE[(self.task.idx // 17 + self.rollout) % len(HOSTILE)]
            last.message = {**last.message, "content": f"{text}\n\n{last.message.get('content')}"}
            last.info = {**last.info, "note": HOSTILE[0]}
            trace.explanation = text[:5000]
        if self.number % 97 == 11 and trace.reward:  # paid for nothing
            last.message = {"role": "assistant", "content": ""}
        if self.number % 89 == 5 and trace.reward:
            last.message = {**last.message, "content": "again and again\n" * 20 + f"{MARK} {trace.answer}"}

    def _fail(self) -> None:
        which = (self.task.idx if self.task.idx % 29 == 7 else self.number) % len(FAILURES)
        outcome, kind, message, phase, place = FAILURES[which]
        where = f'  File "{place.partition(":")[0] or "policy.py"}", line {place.partition(":")[2] or 12}, in step\n'
        text = f"Traceback (most recent call last):\n{where}    return a / 0\n{kind}: {message}\n"
        self.trace.fail(outcome, Failure(kind, message, phase, text, place))
        if phase == "start":
            self.trace.turns, self.trace.final, self.trace.tokens = [], [], None
        elif phase == "policy":
            self.trace.turns[-1].message = None
            self.trace.final = []

    def _add_times(self) -> None:
        trace, random = self.trace, self.random
        for turn in trace.turns:
            turn.policy_seconds = round(random.uniform(0.2, 3.0), 4)
            turn.environment_seconds = round(random.uniform(0.001, 0.2), 4)
        policy = sum(turn.policy_seconds for turn in trace.turns)
        environment = sum(turn.environment_seconds for turn in trace.turns)
        score = 0.5 * trace.turns[-1].environment_seconds if self.task.data_source != "walk" else 0.0
        trace.retries = random.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 5))
        trace.timing = Timing(start=0.01, policy=policy, environment=environment, score=score, close=0.002)
        trace.timing.total = round(0.012 + policy + environment, 4)
        trace.timing.began = FIRST_SECOND + self.task.idx * 1.7 + self.rollout * 0.11

    def _add_tokens(self) -> None:
        """One sequence that goes on from turn to turn; some break, some were realigned, some have no logprobs."""
        tokens, sequence = Tokens(), TokenSequence()
        tokens.sequences.append(sequence)
        known, old_and_new = self.number % 6 != 0, self.number % 5 == 0
        for number, turn in enumerate(self.trace.turns):
            if number and self.number % 21 == 0:
                sequence = TokenSequence(breaks_history=True)
                tokens.sequences.append(sequence)
            elif number and self.number % 9 == 0:
                sequence.realigned += 1
            said = text_of((turn.message or {}).get("content")) or "call"
            for count, mask in ((min(200, len(str(turn.observed)) // 4), 0), (min(1500, 1 + len(said) // 4), 1)):
                sequence.ids += [self.random.randrange(151_000) for _ in range(count)]
                sequence.mask += [mask] * count
                if known:
                    drawn = (-self.random.expovariate(2.0) for _ in range(count))
                    sequence.logprobs += [round(one, 4) if mask else 0.0 for one in drawn]
                if old_and_new:
                    sequence.versions += [3 + number if mask else -1] * count
        self.trace.tokens = tokens
        if old_and_new:
            self.trace.version, self.trace.last_version = 3, 2 + len(self.trace.turns)


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def make_viewed_run(
    folder: Path,
    *,
    tasks: int = 200,
    rollouts: int = 8,
    seed: int = 0,
    model: str = "qwen-7b",
    shift: float = 0.0,
    steps: int = 0,
    finished: bool = True,
) -> Run:
    """Writes the run; with `finished` its summary too, as at the end of an evaluation."""
    config = EvalConfig(taskset={"id": PLACE, "num_tasks": tasks}, model=model, num_rollouts=rollouts, limits=LIMITS)
    what = Evaluation(config, Viewed(ViewedConfig(num_tasks=tasks)))
    tally = Tally()
    with RunFolder.create(folder, TRACES, what) as run:
        for trace in viewed_traces(tasks, rollouts, seed, model, shift, steps):
            run.append(trace)
            tally.add(trace)
        if finished:
            run.write_summary(tally.summary())
    remember(folder)
    return Run(folder)


def viewed_traces(tasks: int, rollouts: int, seed: int = 0, model: str = "qwen-7b", shift: float = 0.0, steps: int = 0):
    for number in range(tasks):
        task = make_task(number)
        for rollout in range(rollouts):
            trace = Made(task, rollout, seed, model, shift).play()
            if steps:
                trace.step = number * steps // tasks
            yield trace


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=f"Writes a run of {', '.join(SOURCES)}.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="qwen-7b")
    parser.add_argument("--shift", type=float, default=0.0, help="how much easier all tasks are")
    parser.add_argument("--steps", type=int, default=0, help="steps of a training that the rollouts belong to")
    options = vars(parser.parse_args())
    print(make_viewed_run(options.pop("folder"), **options))
