"""The parts of the agent loop that do not need verl: its settings, the model's calls, and the group of a prompt.

    calls = ModelCalls(server_manager.generate, sampling_params, prompt_length=1024, response_length=1024)
    calls.begin()                              # for each attempt at the episode
    sampled = await calls.sample(prompt)

    with groups.join(uid) as member:
        member.end(EpisodeScore(reward, passed))
        mean = await member.mean_of_others()    # if it failed: waits until the others have ended

GRPO compares the rewards of a group. A failed episode's sample trains nothing, but verl counts its reward in the
group's mean. Given the mean of the others, the group's mean does not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

import msgspec

from treetune.chat.tokens import Prompt, TokenSequence
from treetune.errors import UsageError
from treetune.serve import ServeError
from treetune.trainers.agents import Openings
from treetune.trainers.episodes import EpisodeSettings
from treetune.trainers.group_scores import score_group
from treetune.trainers.token_episode import Sampled, TokenEpisode


class LoopConfig(EpisodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the agent loop's YAML file, and of `treetune_loop` in a verl config. Without `rewrites`, the v1
    trainer splits where rows can be joined, and the v0 trainer keeps."""

    seconds: float | None = None
    """The time limit of an episode in seconds, checked between turns."""
    model_timeout: float | None = None
    """Seconds for one model call; a call that takes longer has failed."""
    attempts: Annotated[int, msgspec.Meta(ge=1)] = 2
    """How often an episode is started in all, if it fails for a reason other than the model."""
    seeded: bool = True
    """Whether each call of vLLM has a seed, so that a resumed training samples what it would have sampled. It follows
    from `actor_rollout_ref.rollout.seed`, the task, the step, the rollout and the call."""
    on_failure: Literal["mask", "drop", "raise"] = "mask"
    """How an episode is handled that failed every time. `mask`: a sample that trains nothing. `drop`: no sample, which
    only verl's v1 trainer accepts. `raise`: the error goes to the trainer."""


class ModelCalls:
    def __init__(
        self,
        generate: Callable[..., Awaitable[Any]],
        sampling_params: Mapping[str, Any],
        *,
        prompt_length: int,
        response_length: int,
        timeout: float | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        seed_of: Callable[[int], int] | None = None,
        agent: bool = False,
    ) -> None:
        """`request_id` names the episode if a run must be repeatable; otherwise each attempt has its own. `timeout`
        applies to one call, in seconds. With an `agent`, any call may begin a conversation of its own. `seed_of` gives
        the seed of each call by its number, also across attempts: another attempt may take other answers."""
        self._generate, self._params = generate, sampling_params
        self._prompt_length, self._response_length = prompt_length, response_length
        self._timeout, self._given_id = timeout, request_id
        self._seed_of, self._number = seed_of, 0
        self._agent = agent
        self._further = {} if priority is None else {"priority": priority}
        self.begin()

    def begin(self) -> None:
        """Start an episode, or start it again."""
        self._request_id = self._given_id or uuid4().hex
        self._longest: int | None = None
        self._openings = Openings()
        self.fields: dict[str, Any] = {}
        """The engine's report: the versions of the weights that sampled the first and the last token."""
        self.seconds = 0.0
        self.preempted: int | None = None
        self._experts: list[Any] = []

    def longest_prompt(self) -> int | None:
        """The prompt limit: that of verl for the first prompt; everything after it must fit into verl's response, with
        room for an answer."""
        if self._agent:
            return None  # `sample` says whether there is room
        return self._prompt_length if self._longest is None else self._longest - 1

    async def sample(self, prompt: Prompt) -> Sampled | None:
        ids = prompt.ids
        if self._agent:
            # verl's prompt may be as long as the first one of a conversation; the rest must fit into its response
            self._longest = min(self._openings.find(ids), self._prompt_length) + self._response_length
        elif self._longest is None:
            self._longest = len(ids) + self._response_length
        room = self._longest - len(ids)
        if room < 1:
            return None
        own = {"max_tokens": min(room, self._params.get("max_tokens") or room)}
        if self._seed_of is not None:
            own["seed"] = self._seed_of(self._number)
            self._number += 1
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                said = await self._generate(
                    request_id=self._request_id,
                    prompt_ids=ids,
                    sampling_params={**self._params, **own},
                    **self._further,
                )
        except TimeoutError:
            remedy = "allow more: model_timeout"
            raise ServeError(f"the model did not answer in {self._timeout} seconds", remedy=remedy) from None
        finally:
            self.seconds += time.perf_counter() - began
        self._note(said)
        wanted = self._params.get("logprobs") or said.log_probs
        return Sampled(list(said.token_ids), list(said.log_probs or ()) if wanted else None, prompt_ids=ids)

    def _note(self, said: Any) -> None:
        reported = said.extra_fields or {}
        if not self.fields:
            self.fields = dict(reported)
        elif reported.get("max_global_steps") is not None:
            self.fields["max_global_steps"] = reported["max_global_steps"]
        if said.num_preempted is not None:
            self.preempted = (self.preempted or 0) + said.num_preempted
        self._experts.append(said.routed_experts)

    def experts_of(self, sequences: Sequence[TokenSequence]) -> list[Any]:
        """Return the experts that the engine routed each sequence to, if it reports them: its last turn has them
        all."""
        if not any(routed is not None for routed in self._experts):
            return [None] * len(sequences)
        if self._agent:
            raise UsageError("the experts of an agent's calls cannot be replayed", remedy="switch router replay off")
        found, turn = [], -1
        for sequence in sequences:
            starts = zip([0, *sequence.mask], sequence.mask, strict=False)
            turn += sum(1 for before, now in starts if now > before)
            found.append(self._experts[turn] if 0 <= turn < len(self._experts) else None)
        return found


class EpisodeScore(NamedTuple):
    reward: float
    passed: float

    @classmethod
    def of(cls, played: TokenEpisode) -> EpisodeScore | None:
        """Return the score of an episode; None if it failed."""
        if (reward := played.reward) is None:
            return None
        return cls(reward, float(played.passed))


class GroupMember:
    def __init__(self, group: _PromptGroup) -> None:
        self._group = group
        self._playing = True

    def end(self, ended: EpisodeScore) -> None:
        self._group.ended.append(ended)
        self.stop()

    async def score_together(self, played: TokenEpisode, sizes: Container[int] | None = None) -> None:
        """Wait for the group's other episodes, and have the taskset score all of them. Raises if the group has none of
        the `sizes`: then the other members are in another process."""
        group = self._group
        group.together.append(played)
        await asyncio.sleep(0)
        self.stop()
        await group.all_ended.wait()
        if sizes is not None and group.joined not in sizes:
            raise UsageError(
                "the rollouts of a prompt are scored together, and are divided between verl's workers",
                remedy="make data.train_batch_size a multiple of actor_rollout_ref.rollout.agent.num_workers",
            )
        await group.score()

    async def mean_of_others(self) -> EpisodeScore | None:
        """Return the mean of the group's other episodes; None if no other was played."""
        await asyncio.sleep(0)  # other members of the group may be about to start
        self.stop()
        await self._group.all_ended.wait()
        await self._group.score()
        ended = self._group.ended
        if not ended:
            return None
        return EpisodeScore(*(sum(values) / len(ended) for values in zip(*ended, strict=True)))

    def stop(self) -> None:
        if self._playing:
            self._playing = False
            self._group.playing -= 1
            if not self._group.playing:
                self._group.all_ended.set()


class _PromptGroup:
    def __init__(self) -> None:
        self.members = self.playing = self.joined = 0
        self.ended: list[EpisodeScore] = []
        self.all_ended = asyncio.Event()
        self.together: list[TokenEpisode] = []
        """The episodes to be scored together."""
        self._scoring: asyncio.Future[None] | None = None

    async def score(self) -> None:
        """Score `together`, once, for the first caller."""
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._score())
        await asyncio.shield(self._scoring)

    async def _score(self) -> None:
        await score_group(self.together)
        self.ended += filter(None, map(EpisodeScore.of, self.together))


class PromptGroups:
    def __init__(self) -> None:
        self._groups: dict[str, _PromptGroup] = {}

    @contextlib.contextmanager
    def join(self, uid: str) -> Iterator[GroupMember]:
        group = self._groups.setdefault(uid, _PromptGroup())
        group.members += 1
        group.joined += 1
        group.playing += 1
        group.all_ended.clear()
        member = GroupMember(group)
        try:
            yield member
        finally:
            member.stop()
            group.members -= 1
            if not group.members:
                self._groups.pop(uid, None)
