"""A Judge is a scorer that asks a model, by an instruction, a reference, a rubric, or pairwise within a group.

    scorer = Judge(model="judge", rubric="helpful.yaml")
    score = await scorer.score(answer, truth, task)

If there is no verdict, the scorer raises `JudgeError`: the rollout fails and does not earn 0. If the answer is the
cause, it earns 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from treetune.chat.message import text_of, without_surrogates
from treetune.config.structs import FileName, ModelName
from treetune.core.policy import Sampling
from treetune.core.score import Score
from treetune.core.task import Task
from treetune.core.trace import record
from treetune.errors import InvalidAction, TasksetError, TreetuneError
from treetune.models import EndpointConfig, check_reachable
from treetune.scorers.judges import methods
from treetune.scorers.judges.methods import Criterion, Rubric, read_rubric
from treetune.scorers.judges.model import Asked, Call, Culprits, JudgeModel, ask, find_all_culprits
from treetune.scorers.judges.question import Question
from treetune.scorers.reading.extraction import extract, read_as_written
from treetune.scorers.reading.statements import strip_thinking
from treetune.scorers.scorer import Scorer

if TYPE_CHECKING:
    from treetune.core.trace import Trace


class JudgeError(TreetuneError, code="judge"):
    """The judge gave no verdict."""


class Judge(Scorer, frozen=True, kw_only=True, tag="judge"):
    model: ModelName = ""
    """The model that judges: one behind the endpoint, `local:PATH`, or `scripted:file.py:Name`."""
    endpoint: EndpointConfig = EndpointConfig()
    """The judge's endpoint: its own address, key and retries, separate from those of the judged model."""
    sampling: Sampling = JudgeModel().sampling
    """How verdicts are sampled. A verdict cut off by `max_tokens` cannot be parsed."""
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] = JudgeModel().max_concurrent
    """The maximum number of concurrent calls per process."""
    retries: Annotated[int, msgspec.Meta(ge=0)] = JudgeModel().retries
    """How often to ask again if a verdict cannot be parsed. After that the rollout fails; or the answer earns 0, if the
    judge gives a verdict on a neutral answer."""
    method: Literal["grade", "equal", "rubric", "pairwise"] | None = None
    """Absent: `rubric` if one is given, else `grade`."""
    instruction: str | None = None
    """What to judge by. Absent: whether the answer agrees with the ground truth."""
    partial: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """The reward for a P of `grade`."""
    rubric: FileName | None = None
    """A YAML or TOML file with criteria."""
    criteria: list[Criterion] = []
    """The criteria, instead of a file."""
    calls: Literal["each", "once"] = "each"
    """Use one call for each criterion, cached separately, or one call for all of them."""
    opponents: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """How many other answers each answer is compared with by `pairwise`. Absent: all others of its group."""
    judges: list[JudgeModel] = []
    """Several judges instead of `model`; each is asked every question."""
    combine: Literal["mean", "majority"] = "mean"
    """How to combine several judges: the mean, or the highest reward that more than half of them reach."""

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.judges):
            raise ValueError("a judge needs either model: NAME or judges: [{model: NAME}, ...]")
        _ = self.models  # raises if a model may not run
        if self.rubric is not None and self.criteria:
            raise ValueError("give the rubric as a file or as criteria, not both")
        has_rubric = self.rubric is not None or bool(self.criteria)
        if has_rubric != (self.way == "rubric"):
            raise ValueError(f"method: {self.way} and a rubric do not go together")
        if self.criteria:
            Rubric(criteria=self.criteria)  # raises if it is invalid

    @property
    def way(self) -> str:
        has_rubric = self.rubric is not None or bool(self.criteria)
        return self.method or ("rubric" if has_rubric else "grade")

    @property
    def models(self) -> list[JudgeModel]:
        return self.judges or [JudgeModel(**{key: getattr(self, key) for key in JudgeModel.__struct_fields__})]

    @property
    def scores_groups(self) -> bool:
        """Whether answers are compared with each other; a single answer then has no reward."""
        return self.way == "pairwise"

    @property
    def calls_models(self) -> bool:
        return True

    def check(self) -> None:
        """Raise if the models or the rubric are invalid, before anything is asked."""
        for model in self.models:
            model.check()
        if self.way == "rubric":
            self.read_rubric()

    def check_reachable(self) -> None:
        for model in self.models:
            try:
                check_reachable(model.model, model.endpoint, "scorer.endpoint")
            except TreetuneError as error:
                known = "with scorer.endpoint.preflight: false, verdicts that are known already will do"
                remedy = f"{error.remedy}; {known}" if error.remedy else known
                raise type(error)(f"the judge: {error.message}", remedy=remedy) from None

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        needed = self.way == "equal" or (self.way == "grade" and self.instruction is None)
        return "is missing" if needed and methods.show_truth(truth) is None else None

    def read_rubric(self) -> Rubric:
        if self.rubric is None:
            return Rubric(criteria=self.criteria, instruction=self.instruction)
        file = Path(self.rubric).expanduser()
        stamp = (status := file.stat()).st_mtime_ns + status.st_size if file.is_file() else 0
        rubric = _read_once(str(file), stamp)
        return rubric if self.instruction is None else msgspec.structs.replace(rubric, instruction=self.instruction)

    def without_files(self) -> Judge:
        """Replace the rubric file by its contents, so that a row works on any machine."""
        if self.rubric is None:
            return self
        read = self.read_rubric()
        return msgspec.structs.replace(self, rubric=None, criteria=read.criteria, instruction=read.instruction)

    async def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        if self.answer is not None and (found := extract(answer, self.answer, read_as_written)).text is None:
            return Score(0.0, explanation=found.why)
        answer = _spoken(answer) if self.answer is None else found.text or ""
        if self.scores_groups:
            return Score(0.0, answer=answer, explanation="compared with the other rollouts of its task")
        if not answer:
            return Score(0.0, answer="", explanation="there is no answer to judge")
        plan = self._plan(answer, truth, task)
        calls, asked = await self._ask(plan.questions)
        record(judgement for one in asked for judgement in one.judgements)
        culprits = await find_all_culprits(calls, asked)
        record(judgement for found in culprits.values() for judgement in found.judgements)
        if blamed := [found for found in culprits.values() if found.names]:
            raise InvalidAction(blamed[0].problem, warning=blamed[0].warning)
        verdicts = _verdicts(asked, answer)
        step = len(plan.questions)
        return self._together([plan.decide(verdicts[at : at + step]) for at in range(0, len(verdicts), step)], answer)

    async def score_group(self, task: Task, traces: Sequence[Trace]) -> list[float]:
        """The mean result of each trace against the others (win 1, tie 0.5). Adds judgements to the traces."""
        if len(traces) < 2:
            raise TasksetError(
                "a judge that compares needs several scored rollouts of a task", remedy="pass -r 2 or more"
            )
        answers = [self._answer_of(trace) for trace in traces]
        firsts = {answer: number for number, answer in reversed(list(enumerate(answers))) if answer}
        different = {number: answers[number] for number in sorted(firsts.values())}  # equal answers earn the same
        comparisons = methods.compare(different, task.ground_truth, task, self.instruction, self.opponents)
        calls, asked = await self._ask([question for comparison in comparisons for question in comparison.questions])
        step = 2 * len(comparisons)
        culprits = await find_all_culprits(calls, asked)
        at_fault: dict[int, Culprits] = {}
        for number, one in enumerate(asked):
            comparison, found = comparisons[number % step // 2], culprits.get(number)
            traces[comparison.pair[0]].judgements += one.judgements
            if found is not None:
                traces[comparison.pair[0]].judgements += found.judgements
                at_fault |= dict.fromkeys(comparison.places_of(found.names, number % 2), found)
        longest = max(answers, key=len)
        verdicts: list[methods.Verdict] = []
        for number, one in enumerate(asked):
            comparison = comparisons[number % step // 2]
            lost = at_fault.keys() & set(comparison.pair)
            verdicts += [comparison.verdict_against(lost, number % 2)] if lost else _verdicts([one], longest)
        rewards = []
        splits = dict.fromkeys(different, 0.0)
        for judge in range(len(self.models)):
            points: dict[int, list[float]] = {number: [] for number in different}
            for number, comparison in enumerate(comparisons):
                said = verdicts[judge * step + 2 * number :][:2]
                for place, point in zip(comparison.pair, comparison.points(said), strict=True):
                    points[place].append(point)
                    splits[place] += comparison.is_split(said)
            # If all answers are equal, there is nothing to compare, and each gets half a point as for a tie.
            rewards.append({number: _mean(of_one or [0.5]) for number, of_one in points.items()})
        combined = {number: self._combined([of_judge[number] for of_judge in rewards]) for number in different}
        combined |= dict.fromkeys(at_fault, 0.0)
        for trace, answer in zip(traces, answers, strict=True):
            trace.metrics[methods.SPLIT] = splits[firsts[answer]] if answer else 0.0
            if (blamed := at_fault.get(firsts.get(answer, -1))) is not None:
                trace.explanation = blamed.problem
                trace.warnings.append(blamed.warning)
        return [combined[firsts[answer]] if answer else 0.0 for answer in answers]

    async def _ask(self, questions: Sequence[Question]) -> tuple[list[Call], list[Asked]]:
        """Ask every judge every question, concurrently; results are ordered by judge."""
        calls = [(model, question) for model in self.models for question in questions]
        return calls, await asyncio.gather(*(ask(model, question) for model, question in calls))

    def _plan(self, answer: str, truth: Any, task: Task | None) -> methods.Plan:
        if self.way == "rubric":
            return methods.by_rubric(answer, truth, task, self.read_rubric(), self.calls == "once")
        if self.way == "equal":
            return methods.equal(answer, truth, task, self.instruction)
        return methods.grade(answer, truth, task, self.instruction, self.partial)

    def _together(self, scores: Sequence[Score], answer: str) -> Score:
        rewards = [score.reward for score in scores]
        names = {name for score in scores for name in score.metrics}
        metrics = {name: _mean([score.metrics[name] for score in scores]) for name in sorted(names)}
        told = scores[0].explanation or ""
        if len(scores) > 1:
            metrics[methods.SPLIT] = max(metrics.get(methods.SPLIT, 0.0), float(len(set(rewards)) > 1))
            pairs = zip(self.models, scores, strict=True)
            told = " | ".join(f"{judge.model}: {score.explanation}" for judge, score in pairs)
        return Score(self._combined(rewards), answer=answer, explanation=told, metrics=metrics)

    def _answer_of(self, trace: Trace) -> str:
        """The answer to compare, extracted as for a single score; empty if the policy gave none."""
        turn = next((turn for turn in reversed(trace.turns) if turn.message is not None), None)
        if turn is None or turn.message is None:
            return ""
        if turn.calls:  # a final tool submitted the answer; text next to calls does not count
            return trace.answer or ""
        said = text_of(turn.message.get("content")) or ""
        return _spoken(said) if self.answer is None else extract(said, self.answer, read_as_written).text or ""

    def _combined(self, rewards: list[float]) -> float:
        if self.combine == "mean":
            return _mean(rewards)
        return sorted(rewards, reverse=True)[len(rewards) // 2]


_read_once = lru_cache(maxsize=64)(lambda path, stamp: read_rubric(path))


def _spoken(answer: str) -> str:
    text: str = without_surrogates(strip_thinking(answer))
    return text.strip()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _verdicts(asked: Sequence[Asked], answer: str) -> list[dict[str, str]]:
    """The verdicts; raises if one is missing."""
    found = []
    for one in asked:
        if (verdict := one.verdict) is None:
            call = one.judgements[-1]
            if one.too_long and 2 * len(answer) > len(call.prompt):
                # The answer itself fills the prompt. An answer must not be able to avoid judgement.
                raise InvalidAction(f"the answer of {len(answer)} characters is too long for the judge {call.model}")
            raise JudgeError(
                f"the judge {call.model} gave no verdict on {call.asked}: {one.failure}",
                remedy="look at `judgements` in the trace; a failed rollout is tried again by --resume",
            )
        found.append(verdict)
    return found
