"""Asks the model behind a judge, with retries, a limit on concurrent calls, and cached verdicts.

    asked = await ask(JudgeModel(model="judge", endpoint=EndpointConfig(base_url="http://127.0.0.1:8000/v1")), question)
    asked.verdict                       # {"grade": "C"}; None if it could not be obtained, see `asked.failure`

All calls of a process to one judge go through one `Client` on the background loop, whichever loops the callers use.
Verdicts are cached on disk, one file each, under the hash of the judge and the prompt. Processes and machines share
the folder without a lock.

An answer can say "Reply only with OK". Then its reward of 0 would become a failure, which does not count. So if a
verdict remains unreadable, `find_culprits` asks the same judge the same question with a neutral text instead of the
answer. If the judge gives a verdict on that, the answer is the cause.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec

from treetune.chat.message import Message, without_surrogates
from treetune.config.code_files import hash_files
from treetune.config.structs import ModelName, convert
from treetune.config.trust import current_origin
from treetune.core.policy import Completion, Policy, Request, RetryCount, Sampling, Usage
from treetune.core.task import Task
from treetune.core.trace import Judgement
from treetune.errors import ContextFullError, EndpointRefusal, reason_of
from treetune.models import (
    EndpointConfig,
    check_policy,
    check_script,
    endpoint_of,
    is_behind_endpoint,
    load_policy,
    script_file,
)
from treetune.play.given_tasks import GivenTasks
from treetune.scorers.judges.question import Question, Unreadable
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically
from treetune.system.threads import submit_in_background


class JudgeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    model: ModelName = ""
    """The model that judges: one behind the endpoint, `local:PATH`, or `scripted:file.py:Name`."""
    endpoint: EndpointConfig = EndpointConfig()
    """The judge's endpoint: its own address, key and retries, separate from those of the judged model."""
    sampling: Sampling = Sampling(temperature=0.0, max_tokens=1024)
    """How verdicts are sampled. A verdict cut off by `max_tokens` cannot be parsed."""
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] = 16
    """The maximum number of concurrent calls per process."""
    retries: Annotated[int, msgspec.Meta(ge=0)] = 2
    """How often to ask again if a verdict cannot be parsed. After that the rollout fails; or the answer earns 0, if the
    judge gives a verdict on a neutral answer."""

    @classmethod
    def read_config(cls, value: Any, path: str = "", raw: Mapping[str, str] | None = None) -> JudgeModel:
        return value if isinstance(value, cls) else convert(value, cls, path=path, raw=raw)

    def identity(self) -> dict[str, Any]:
        """Everything that its verdicts depend on."""
        who: dict[str, Any] = {"model": self.model, "sampling": msgspec.to_builtins(self.sampling)}
        if is_behind_endpoint(self.model):
            who["base_url"] = self.endpoint.base_url
        elif (file := script_file(self.model)) is not None:
            who = {"model": f"{file.name}:{self.model.rpartition(':')[2]}", "code": hash_files([file])}
        return who

    def __post_init__(self) -> None:
        # The model is loaded when it is first asked. Whether its name may run is known only here, where the name was
        # read.
        check_script(self.model, current_origin())

    def check(self) -> None:
        """Raise if the model is invalid, before anything is asked."""
        if is_behind_endpoint(self.model):
            endpoint_of(self.model, self.endpoint)[1].api_key("scorer.endpoint")
        check_policy(self.model, _NO_TASKS, self.endpoint, "scorer.endpoint")


class Asked(msgspec.Struct):
    """The result of a question: the calls that were made, and the verdict."""

    judgements: list[Judgement]
    too_long: bool = False
    """Whether the prompt does not fit the judge's context."""
    unsettled: bool = False
    """Whether the judge replied without a verdict or refused to reply; the prompt may be the cause."""

    @property
    def verdict(self) -> dict[str, str] | None:
        return self.judgements[-1].verdict

    @property
    def failure(self) -> str:
        return self.judgements[-1].failure or ""


async def ask(judge: JudgeModel, question: Question, *, anew: bool = False) -> Asked:
    """The judge's verdict, from any event loop. If a caller gives up, a call that has begun is finished. With `anew`,
    cached verdicts are not used."""
    asked: Asked = await asyncio.wrap_future(submit_in_background(_ask(judge, question, anew)))
    return asked


async def _ask(judge: JudgeModel, question: Question, anew: bool) -> Asked:
    return await client_of(judge).ask(question, anew)


class _Call:
    """A question that is being asked, and how many callers wait for it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.begun = False
        self.task: asyncio.Task[Asked]


class Client:
    """Asks one judge; runs on the background loop."""

    def __init__(self, judge: JudgeModel) -> None:
        self._judge = judge
        self._policy: Policy | None = None
        self._free = asyncio.Semaphore(judge.max_concurrent)
        self._cache = VerdictCache(judge.identity())
        self._calls: dict[str, _Call] = {}

    async def ask(self, question: Question, anew: bool = False) -> Asked:
        prompt = question.prompt
        if not anew and (known := self._find(question)) is not None:
            return known
        call = self._calls.get(prompt)
        first = call is None
        if call is None:
            call = self._calls[prompt] = _Call()
            call.task = asyncio.ensure_future(self._converse(question, call))
            call.task.add_done_callback(lambda _: self._calls.pop(prompt, None))
        call.waiting += 1
        try:
            asked = await asyncio.shield(call.task)
        finally:
            call.waiting -= 1
            if not call.waiting and not call.begun:  # all callers gave up, and no call was paid for yet
                call.task.cancel()
        return asked if first else _shared(asked, question.name)

    async def close(self) -> None:
        if self._policy is not None:
            await self._policy.close()

    def _find(self, question: Question) -> Asked | None:
        said = self._cache.find(question.prompt)
        if said is None:
            return None
        try:
            verdict = question.read(said.answer)
        except Unreadable:  # written by another version
            return None
        judgement = self._judgement(question, question.prompt, answer=said.answer, usage=said.usage)
        judgement.verdict, judgement.cached = verdict, True
        return Asked([judgement])

    async def _converse(self, question: Question, call: _Call) -> Asked:
        """Ask until there is a verdict. An unreadable reply is not part of the next prompt, because an answer may have
        asked for that reply."""
        prompt, asked = question.prompt, Asked([])
        async with self._free:
            call.begun = True
            for attempt in range(self._judge.retries + 1):
                began = time.perf_counter()
                judgement = self._judgement(question, prompt)
                asked.judgements.append(judgement)
                retries = RetryCount()
                try:
                    with retries:
                        completion = await self._complete(prompt, question.code, attempt)
                except Exception as error:  # the endpoint's own retries are exhausted
                    judgement.failure = reason_of(error)
                    asked.too_long = isinstance(error, ContextFullError)
                    asked.unsettled = isinstance(error, EndpointRefusal)
                    return asked
                finally:
                    judgement.seconds, judgement.retries = time.perf_counter() - began, retries.number
                judgement.answer = without_surrogates(completion.text)
                judgement.usage = completion.usage or Usage()
                try:
                    judgement.verdict = _read(question, completion, judgement.answer)
                except Unreadable as error:
                    judgement.failure = f"its answer cannot be read: {error}: {judgement.answer[-200:]!r}"
                    asked.unsettled = True
                    prompt = question.ask_again(str(error))
                else:
                    asked.unsettled = False
                    self._cache.keep(question.prompt, judgement.answer, judgement.usage)
                    break
        return asked

    async def _complete(self, prompt: str, code: str, attempt: int) -> Completion:
        if self._policy is None:
            self._policy = load_policy(self._judge.model, _NO_TASKS, self._judge.endpoint)
        messages: list[Message] = [{"role": "user", "content": prompt}]
        sampling, task = self._judge.sampling, Task(prompt=list(messages))
        request = Request(messages=messages, sampling=sampling, task=task, turn=attempt, key=f"judge/{code}")
        return await self._policy.complete(request)

    def _judgement(self, question: Question, prompt: str, **known: Any) -> Judgement:
        return Judgement(model=self._judge.model, asked=question.name, prompt=prompt, **known)


def _read(question: Question, completion: Completion, answer: str) -> dict[str, str]:
    if completion.finish_reason == "length":  # the last line may be a quote
        raise Unreadable("it was cut off by the limit on tokens")
    return question.read(answer)


def _shared(asked: Asked, name: str) -> Asked:
    """The result of another caller's call, marked as cached because nothing is paid for it again."""
    last = msgspec.structs.replace(asked.judgements[-1], asked=name, cached=True, retries=0)
    return Asked([last], asked.too_long, asked.unsettled)


_NO_TASKS = GivenTasks()
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, Client]] = WeakKeyDictionary()
"""The clients of the background loop."""
os.register_at_fork(after_in_child=_clients.clear)


def client_of(judge: JudgeModel) -> Client:
    """The client of this process; call it on the background loop."""
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    key = msgspec.json.encode([judge, judge.identity(), str(default_cache_dir())])
    if key not in clients:
        clients[key] = Client(judge)
    return clients[key]


@atexit.register
def _close_clients() -> None:
    for loop, clients in list(_clients.items()):
        for client in clients.values():
            with suppress(Exception):  # the process is ending
                asyncio.run_coroutine_threadsafe(client.close(), loop).result(timeout=5)


class Said(msgspec.Struct, kw_only=True):
    """A judge's reply that contained a verdict."""

    judge: Any
    """The judge, as in the key."""
    prompt: str
    answer: str
    usage: Usage


class VerdictCache:
    def __init__(self, judge: Any) -> None:
        """`judge` has the values that its answers depend on: model, address, sampling."""
        self._judge = judge
        self.folder = default_cache_dir() / "verdicts"

    def find(self, prompt: str) -> Said | None:
        with suppress(OSError, msgspec.MsgspecError):  # missing or damaged: ask the judge again
            return msgspec.json.decode(self.path_of(prompt).read_bytes(), type=Said)
        return None

    def keep(self, prompt: str, answer: str, usage: Usage) -> None:
        path = self.path_of(prompt)
        said = Said(judge=self._judge, prompt=prompt, answer=answer, usage=usage)
        with suppress(OSError):  # with a full disk, the verdict is still returned
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(said))

    def path_of(self, prompt: str) -> Path:
        key = digest([self._judge, prompt], 20)
        return self.folder / key[:2] / f"{key[2:]}.json"


Call = tuple[JudgeModel, Question]


class Culprits(msgspec.Struct, frozen=True):
    names: frozenset[str]
    """The names of the answers that prevent a verdict, as in the material."""
    judgements: list[Judgement]
    """The calls that were made to find out."""
    problem: str
    """The explanation of the reward."""
    warning: str
    """The explanation for the author of the judge, without details that differ from answer to answer."""


async def find_all_culprits(calls: Sequence[Call], asked: Sequence[Asked]) -> dict[int, Culprits]:
    """The culprits for each call without a verdict, by the number of the call."""
    # `Judge.score` checks itself whether a single answer is too long.
    numbers = [
        number
        for number, one in enumerate(asked)
        if one.unsettled or (one.too_long and len(calls[number][1].answers) > 1)
    ]
    found = await asyncio.gather(*(find_culprits(*calls[number], asked[number]) for number in numbers))
    return dict(zip(numbers, found, strict=True))


async def find_culprits(model: JudgeModel, question: Question, asked: Asked) -> Culprits:
    """Find the answers that prevent a verdict. No answer is named if the judge gives no verdict on a neutral text
    either, because then the judge is the cause. Cached verdicts are not used, since the judge may have changed
    since."""
    warning = f"an answer kept the judge {model.model} from a verdict, which counts as 0"
    problem = f"the answer keeps the judge {model.model} from a verdict on {question.name}: {asked.failure}"
    neutral = await ask(model, question.replace_answers(*question.answers), anew=True)
    judgements = list(neutral.judgements)
    if neutral.verdict is None:
        return Culprits(frozenset(), judgements, problem, warning)
    found = set(question.answers)
    if len(found) > 1:  # try each one next to a neutral text
        for name in question.answers:
            alone = await ask(model, question.replace_answers(*set(question.answers) - {name}), anew=True)
            judgements += alone.judgements
            if not (alone.unsettled or alone.too_long):
                found.discard(name)
        if asked.too_long and not found:  # each fits alone, but not both
            found.add(max(question.answers, key=lambda name: len(question.material[name])))
    return Culprits(frozenset(found), judgements, problem, warning)
