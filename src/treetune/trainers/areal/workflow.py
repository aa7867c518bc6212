"""AReaL: a workflow that trains on any task server.

    trainer.train(
        workflow="treetune.trainers.areal.TaskServerWorkflow",
        workflow_kwargs={"gconfig": config.gconfig, "tokenizer": config.tokenizer_path, "url": "http://127.0.0.1:5000"},
    )

Each call of `arun_episode` plays one episode. A trajectory holds exactly the tokens that were sampled. If AReaL samples
groups, the calls with the same row are a group: each waits for the others, and its rewards are advantages. AReaL's own
`reward_norm` must be null: it takes rows in chunks of a fixed size, so one lost episode would shift all later groups.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from treetune.chat.tokens import ChatTokens, Prompt, Rewrites, TokenSequence
from treetune.core.contract import Contract, Credit
from treetune.errors import CreditError, MissingExtraError, PolicyError
from treetune.gateway import AgentPolicy
from treetune.serve import ServeError, TaskServerClient
from treetune.trainers.credit import turn_advantages
from treetune.trainers.episodes import connect, is_misuse
from treetune.trainers.token_episode import FailureLog, Hooks, Sample, Sampled, TokenEpisode, play_episode

try:
    import numpy as np
    import torch
    from areal import workflow_context
    from areal.api import ModelRequest, RolloutWorkflow
    from areal.utils import logging, stats_tracker
except ImportError as error:
    raise MissingExtraError(
        f"AReaL cannot be imported: {error}", remedy="install areal as its guide describes"
    ) from error

log = logging.getLogger("TaskServerWorkflow")
EPSILON = 1e-5
"""What AReaL adds to the deviation of a group."""


class _Group:
    """The episodes of a row, which start together."""

    def __init__(self) -> None:
        self.playing = 0
        self.played: list[tuple[TokenEpisode, float]] = []
        """Those that have a reward, with it."""
        self.ended = asyncio.Event()
        self._advantages: dict[tuple[Credit, float], list[list[float]]] = {}

    def advantages_of(self, number: int, credit: Credit, discount: float, *, by_deviation: bool) -> list[float]:
        """Return the advantages of the turns of the episode that ended as this `number`, when all have ended: one for
        all turns with credit by outcome."""
        by = credit, discount
        if by not in self._advantages:
            by_turn = credit == "turn"
            rewards = [each.shape_each(each.turns) if by_turn else [reward] for each, reward in self.played]
            self._advantages[by] = turn_advantages(
                rewards, credit=credit, discount=discount, by_deviation=by_deviation, epsilon=EPSILON
            )
        return self._advantages[by][number]


class TaskServerWorkflow(Hooks, RolloutWorkflow):  # type: ignore[misc]
    FOREIGN = Contract(turn_discount=0.95)

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        url: str | Sequence[str],
        *,
        max_turns: int | None = None,
        turn_discount: float | None = None,
        rewrites: Rewrites = "keep",
        group_norm: Literal["deviation", "mean", "none"] = "deviation",
        no_turn_credit: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        call_format: str | None = None,
        agent: str | None = None,
        token_env: str = "TREETUNE_TOKEN",
        timeout: float = 600.0,
        patience: float = 60.0,
    ) -> None:
        """`url` is one or more task servers. `max_turns` and `turn_discount` replace what they declare; the reward of a
        server that declares nothing is multiplied by 0.95 for each turn. `group_norm` is what the rewards of a group
        become: advantages, divided by the group's deviation or not, or, with `none`, rewards as they are.
        `no_turn_credit` is why AReaL's settings allow no `credit: turn`; its episodes are refused then. `call_format`
        is how the model writes tool calls, if its chat template does not show it. `agent` plays the episodes instead of
        the model itself, if their tasks have one answer. `token_env` names the variable with the servers' token.
        `timeout` applies to one step, `patience` to a server that does not answer."""
        super().__init__(max_turns, turn_discount)
        if isinstance(tokenizer, str):
            from areal.utils.hf_utils import load_hf_tokenizer

            tokenizer = load_hf_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self._in_groups, self._norm = gconfig.n_samples > 1, group_norm
        self._no_turn_credit = "group_norm='none' gives turns no advantages" if group_norm == "none" else no_turn_credit
        self._groups: dict[int, _Group] = {}
        """By the id of a row, while its episodes are played."""
        self._chat = ChatTokens(tokenizer, chat_template_kwargs, rewrites=rewrites, call_format=call_format)
        urls = (url,) if isinstance(url, str) else tuple(url)
        self._access, self._agent = (urls, token_env, timeout, patience), agent

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Return a trajectory, or None if there is nothing to train on."""
        if not self._in_groups:
            ended = await self._play(engine, data)
            return None if ended is None else tensors(ended[0].tokens.sequences, ended[1])
        # AReaL starts the episodes of a group together, with the same row: a group ends with its last one.
        group = self._groups.setdefault(id(data), _Group())
        group.playing += 1
        try:
            ended = await self._play(engine, data)
            if ended is not None:
                number = len(group.played)
                group.played.append(ended)
        finally:
            group.playing -= 1
            if not group.playing:
                del self._groups[id(data)]
                group.ended.set()
        if ended is None:
            return None
        played, reward = ended
        credit, discount = played.contract.turn_credit
        if self._no_turn_credit and credit == "turn":
            problem = f"task {data.get('task_index')} declares credit: turn, and {self._no_turn_credit}"
            raise CreditError(problem, remedy="change that setting, or declare credit: outcome")
        if self._norm == "none":
            return tensors(played.tokens.sequences, reward)
        await group.ended.wait()
        advantages = group.advantages_of(number, credit, discount, by_deviation=self._norm == "deviation")
        return trajectory_of(played.tokens.sequences, advantages, credit)

    async def _play(self, engine: Any, data: dict[str, Any]) -> tuple[TokenEpisode, float] | None:
        """Play an episode and log its figures; None if it was lost or has no reward, else with its reward."""
        client, failures = open_servers(asyncio.get_running_loop(), *self._access)
        stats = stats_tracker.get(workflow_context.stat_scope())
        try:
            index = data.get("task_index", data.get("index"))
            if index is None and self._in_groups:
                failures.warn_once("rows without a task_index: the episodes of one group are of different tasks")
            played = await play_episode(
                lambda: client.start(None if index is None else int(index), step=engine.get_version()),
                self._chat,
                self,
                self._sampler(engine),
                longest_prompt=self.gconfig.max_tokens - 1,
                attempts=1,
                agent=None if self._agent is None else open_agent(asyncio.get_running_loop(), self._agent),
            )
            if played.failure is not None:
                raise played.failure
        except (ServeError, PolicyError) as error:
            if self._agent is not None and is_misuse(error):
                raise
            failures.add(error)
            stats.scalar(task_server_failure=1.0)
            return None
        stats.scalar(task_server_failure=0.0)
        if (reward := played.reward) is None:
            return None
        sequences = played.tokens.sequences
        if len(sequences) > 1 and played.record is None:
            failures.warn_once("the chat template rewrites history: such episodes become several rows")
        stats.scalar(
            reward=reward,
            num_turns=played.turns,
            realigned_turns=sum(sequence.realigned for sequence in sequences),
            split_sequences=len(sequences) - 1,
        )
        stats.scalar(**played.metrics)
        return played, reward

    def _sampler(self, engine: Any) -> Sample:
        request = uuid.uuid4().hex  # one for all turns, so that they find the same inference server and its cache

        async def sample(prompt: Prompt) -> Sampled:
            asked = {"rid": request, "input_ids": list(prompt.ids), "gconfig": self.gconfig.new()}
            said = await engine.agenerate(ModelRequest(**asked, tokenizer=self.tokenizer))
            versions, given = list(said.output_versions), list(said.input_tokens)
            return Sampled(list(said.output_tokens), list(said.output_logprobs), versions, given)

        return sample


def trajectory_of(
    sequences: Sequence[TokenSequence], advantages: Sequence[float], credit: Credit
) -> dict[str, torch.Tensor] | None:
    """Return the rows of an episode, given the advantages of its turns: a row for each sequence or, if turns are
    credited, for each turn."""
    if credit == "outcome":
        return tensors(sequences, advantages[0])
    spans = [(sequence, span) for sequence in sequences for span in sequence.spans if span.first < span.end]
    rows = [_row_of(sequence, span.first, span.end) for sequence, span in spans]
    return tensors(rows, [advantages[span.turn] for _, span in spans])


def _row_of(sequence: TokenSequence, first: int, end: int) -> TokenSequence:
    """Return a sequence up to the end of a turn, which trains only the tokens of that turn."""

    def only(values: list[Any], other: Any) -> list[Any]:
        return [other] * first + values[first:end] if values else []

    return TokenSequence(
        sequence.ids[:end], only(sequence.mask, 0), only(sequence.logprobs, 0.0), only(sequence.versions, -1)
    )


def tensors(sequences: Sequence[TokenSequence], rewards: float | Sequence[float]) -> dict[str, torch.Tensor] | None:
    """Return the data that AReaL trains on: one row per sequence with its reward, or with the same, padded on the
    right. None without a sequence: an agent may not have asked the model."""
    if not sequences:
        return None
    shape = len(sequences), max(len(sequence.ids) for sequence in sequences)

    def rows(name: str, dtype: Any, padding: float) -> torch.Tensor:
        filled = np.full(shape, padding, dtype=dtype)  # numpy reads lists three times as fast as torch
        for row, sequence in zip(filled, sequences, strict=True):
            values = getattr(sequence, name)
            row[: len(values)] = values
        return torch.from_numpy(filled)

    lengths = torch.tensor([len(sequence.ids) for sequence in sequences])
    return {
        "input_ids": rows("ids", np.int32, 0),
        "loss_mask": rows("mask", np.int32, 0),
        "logprobs": rows("logprobs", np.float32, 0.0),
        "versions": rows("versions", np.int32, -1),
        "attention_mask": torch.arange(shape[1])[None, :] < lengths[:, None],
        "rewards": torch.from_numpy(np.full(shape[0], rewards, dtype=np.float32)),
    }


@lru_cache(maxsize=16)
def open_servers(
    loop: asyncio.AbstractEventLoop, urls: tuple[str, ...], token_env: str, timeout: float, patience: float
) -> tuple[TaskServerClient, FailureLog]:
    """Return the client of a run's task servers and the log of their failures. AReaL creates a workflow for every
    episode, so both are kept here, per event loop."""
    from areal.infra.utils.concurrent import register_loop_cleanup

    client = connect(urls, token_env, timeout, patience)
    register_loop_cleanup(client.close)
    return client, FailureLog(log)


@lru_cache(maxsize=16)
def open_agent(loop: asyncio.AbstractEventLoop, agent: str) -> AgentPolicy:
    """Return the agent that plays on an event loop, for the same reason."""
    from areal.infra.utils.concurrent import register_loop_cleanup

    policy = AgentPolicy(agent)
    register_loop_cleanup(policy.close)
    return policy
