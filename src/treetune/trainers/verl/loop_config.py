"""How verl's agent loop of ours is set up: what stands in its YAML file, and in `treetune_loop` of a verl config."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from treetune.chat.tokens import Rewrites


class LoopConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Turns after which an episode is cut off, with what it has earned so far. Else verl's own
    `rollout.multi_turn.max_assistant_turns`, else 50; most environments end earlier."""
    seconds: float | None = None
    """The same for time, looked at between turns."""
    timeout: float = 600.0
    """Seconds for one start or step of the environment; one that takes longer has failed."""
    model_timeout: float | None = None
    """Seconds for one call of the model; one that takes longer has failed."""
    attempts: Annotated[int, msgspec.Meta(ge=1)] = 2
    """How often an episode is begun in all, where it fails by no doing of the model's."""
    on_failure: Literal["mask", "drop", "raise"] = "mask"
    """What becomes of one that failed each time. `mask`: a sample that trains nothing. `drop`: none, which only verl's
    v1 trainer takes. `raise`: the trainer is told."""
    urls: list[str] = []
    """Task servers that play the episodes; none: each worker of verl's plays its own."""
    token_env: str = "TREETUNE_TOKEN"
    """The variable that holds the servers' token."""
    patience: float = 60.0
    """Seconds for which a server that does not answer is asked again."""
    turn_discount: float = 1.0
    """A reward is multiplied by it for each turn."""
    rewrites: Rewrites | None = None
    """Where the chat template rewrites an earlier answer (drops its reasoning): `split` trains each stretch as a sample
    of its own, the default with the v1 trainer; `keep` goes on from the sampled tokens, the default with v0."""
    call_format: str | None = None
    """How the model writes calls of tools, where its chat template does not show that."""
