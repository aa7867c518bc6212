"""A `Gateway` opens sessions in front of one model.

gateway = Gateway(tokenizer, HttpSampler("http://127.0.0.1:8000/v1", "policy"))
session = gateway.open()
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from treetune.chat.tokens import ChatTokens, Rewrites
from treetune.core.policy import Sampling
from treetune.errors import PolicyError
from treetune.gateway.call import Answerer, Refused, Sampler
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.gateway.session import Session, SessionLimits
from treetune.gateway.upstream import HttpSampler
from treetune.play.weights import PAUSE_SECONDS, Calls, Weights
from treetune.system.prometheus import Figures

COUNTED = (
    "calls", "prompt_tokens", "completion_tokens", "replayed", "joined", "abandoned", "upstream_failures",
    "without_ids", "aborted_calls",
)  # fmt: skip
"""What the metrics count from the start."""
log = logging.getLogger("treetune.gateway")
MOST_SESSIONS = 10_000
_KEPT_SECONDS = 3600.0
"""How long the record of a session is kept after its time is over."""


class Gateway:
    def __init__(
        self,
        tokenizer: Any = None,
        sampler: Sampler | None = None,
        *,
        name: str = "model",
        rewrites: Rewrites = "keep",
        call_format: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        limits: SessionLimits | None = None,
        sampling: Sampling | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`name` is the model's name for agents. Without a `sampler`, each session has its own (`behind`).
        `rewrites`, `call_format` and the `arguments` of the chat template are those of `ChatTokens`. `limits` and
        `sampling` are the defaults of its sessions. While the `weights` are paused, calls wait."""
        self.sampler, self.name = sampler, name
        self.limits, self.sampling = limits or SessionLimits(), sampling or Sampling()
        self.weights = weights or Weights()
        self.sessions: dict[str, Session] = {}
        self._dropped: Counter[str] = Counter()
        """What the sessions counted that were dropped."""
        self.ended: OrderedDict[str, str] = OrderedDict()
        """The keys of sessions that were dropped, with the reason."""
        self._model: TokenModel | None = None
        if sampler is not None:
            chat = ChatTokens(tokenizer, arguments, rewrites=rewrites, call_format=call_format)
            self._model = TokenModel(Prompts(chat), sampler)

    def open(
        self,
        limits: SessionLimits | None = None,
        sampling: Sampling | None = None,
        model: str | None = None,
        behind: TokenModel | Answerer | None = None,
        records: bool = False,
        weights: Weights | None = None,
    ) -> Session:
        """Open a session. `sampling` overrides what its agent asks for; calls of another `model` are side calls.
        `behind` answers instead of the gateway's sampler, whose `weights` may change on their own. With `records`, the
        messages of all calls are kept."""
        if len(self.sessions) >= MOST_SESSIONS:
            for session in [session for session in self.sessions.values() if session.seconds_left < -_KEPT_SECONDS]:
                self.drop(session)
            if len(self.sessions) >= MOST_SESSIONS:
                raise Refused(429, f"{MOST_SESSIONS:,} sessions are open: end some (DELETE /sessions/KEY)", "busy")
        behind = behind or self._model
        assert behind is not None, "neither the gateway nor its session has a sampler"
        settings = limits or self.limits, sampling or self.sampling, model, records, weights or self.weights
        session = Session(behind, *settings)
        self.sessions[session.key] = session
        return session

    def drop(self, session: Session) -> None:
        """Close a session and forget its record."""
        session.close()
        if self.sessions.pop(session.key, None) is not None:
            self.ended[session.key] = session.over or ""
            self._dropped.update(session.counts)
            if len(self.ended) > MOST_SESSIONS:
                self.ended.popitem(last=False)

    async def connect(self) -> None:
        """Ask an engine for its model; if it does not answer, calls do so again."""
        if isinstance(self.sampler, HttpSampler):
            try:
                await self.sampler.connect()
            except PolicyError as error:
                log.warning("%s; until it answers, calls fail", error.message)

    def figures(self) -> Figures:
        """What its sessions are doing, and what they have counted so far."""
        gauges = {"sessions": len(self.sessions), "calls_under_way": 0, "paused": int(self.weights.paused)}
        counts = Counter(dict.fromkeys(COUNTED, 0))
        counts.update(self._dropped)
        counts.update(self.weights.counts)
        for session in self.sessions.values():
            counts.update(session.counts)
            gauges["calls_under_way"] += session.under_way
        return Figures("treetune_gateway", gauges, counts)

    async def change_weights(self, body: bytes) -> bool:
        """Set the version of the weights, or begin or end a pause. Returns whether no call is under way."""
        try:
            change = msgspec.json.decode(body, type=_Change)
        except msgspec.MsgspecError as error:
            raise Refused(422, str(error)) from None
        if change.paused:
            return await self.weights.pause(change.calls, change.seconds)
        if change.paused is not None:
            self.weights.resume(change.version)
        elif change.version is not None:
            self.weights.set_version(change.version)
        return not self.figures().gauges["calls_under_way"]

    def close(self) -> None:
        for session in self.sessions.values():
            session.close("the gateway is stopping")
        if isinstance(self.sampler, HttpSampler):
            self.sampler.close()


def read_settings(data: Mapping[str, Any], gateway: Gateway) -> tuple[SessionLimits, Sampling, str | None]:
    """The limits, the sampling and the model of a request for a session; what is not set is the gateway's."""
    try:
        given = msgspec.convert(data, _Opening)
    except msgspec.ValidationError as error:
        raise Refused(422, str(error)) from None
    limits = {**msgspec.to_builtins(gateway.limits), **given.limits}
    sampling = {**msgspec.to_builtins(gateway.sampling), **given.sampling}
    try:
        return msgspec.convert(limits, SessionLimits), msgspec.convert(sampling, Sampling), given.model
    except msgspec.ValidationError as error:
        raise Refused(422, str(error)) from None


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    version: int | None = None
    paused: bool | None = None
    calls: Calls = "finish"
    seconds: float = PAUSE_SECONDS


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    limits: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    model: str | None = None
