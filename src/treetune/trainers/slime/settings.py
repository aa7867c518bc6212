"""What a user may set of all this: the mapping `treetune` in the YAML file of slime's `--custom-config-path`.

treetune: {max_turns: 8, urls: [http://envs-1:5000, http://envs-2:5000]}
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from treetune.chat.tokens import Rewrites
from treetune.config.structs import convert
from treetune.errors import UsageError


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_turns: Annotated[int, msgspec.Meta(ge=1)] = 100
    """The most answers of one episode; most environments end it themselves."""
    turn_discount: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """A reward is multiplied by this for each turn."""
    rewrites: Rewrites | None = None
    """Where a chat template rewrites history: `split` gives several samples, `keep` goes on from the sampled tokens.
    Absent: `split`, but `keep` with `--partial-rollout`, for slime stops no rollouts of several samples."""
    episode_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The most seconds of an episode, looked at between turns; what it has earned by then counts."""
    call_format: str | None = None
    """How the model writes calls of tools, where its chat template does not show that."""
    tries: Annotated[int, msgspec.Meta(ge=1)] = 2
    """How often an episode is played that its environment fails in."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """The most seconds of one start or step of an environment."""
    model_timeout: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """The most seconds of one answer of SGLang."""
    urls: tuple[str, ...] = ()
    """Task servers that play the episodes; without them, this process does."""
    token_env: str = "TREETUNE_TOKEN"
    """The variable that holds the servers' token."""
    patience: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """The most seconds to wait for a server that does not answer."""


def settings_of(args: Any) -> Settings:
    """Those of slime's arguments, read once."""
    found = getattr(args, "treetune", None)
    if isinstance(found, Settings):
        return found
    found = convert(found, Settings, path="treetune", source="--custom-config-path")
    partial = bool(getattr(args, "partial_rollout", False))
    if partial and found.rewrites == "split":
        problem = "--partial-rollout stops no rollouts of several samples, as treetune.rewrites: split makes them"
        raise UsageError(problem, remedy="set treetune.rewrites: keep, or leave one of them out")
    args.treetune = msgspec.structs.replace(found, rewrites=found.rewrites or ("keep" if partial else "split"))
    return settings_of(args)
