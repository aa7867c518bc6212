"""Whether verl's settings can join the rows of an episode, and give credit to its turns.

    why_not_joined(config)       # "gspo does not add up over the rows of an episode: its ratio is one for a row"
    use_trainer(config)          # verl now runs the trainer of `trainer.py`

History that a chat template rewrites makes several training rows of an episode. `trainer.py` counts them once. Where
the settings do not allow that, an episode stays one row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from treetune.core.contract import Credit
from treetune.errors import CreditError
from treetune.trainers.config import get_value, set_value
from treetune.trainers.credit import BY_TOKEN, check_loss

MODE = "trainer.v1.trainer_mode"
"""The key of a verl config for its v1 trainer."""
PREFIX = "treetune_"
"""The beginning of the names of our trainers; verl's own names follow."""
MODULES = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
"""The key for the modules that verl imports in each of its processes."""
TRAINER = "treetune.trainers.verl.trainer"
JOINED = "trainer.v1.treetune_joined"
"""Set while our trainer runs, so that agent loops know of it."""
SHOWN = ("vanilla", "gpg", "cispo", "sapo", "dppo_tv", "dppo_kl")
"""Losses of verl in which `treetune verify-weights verl` shows that rows can be joined."""
_ACTOR, _ALGORITHM = "actor_rollout_ref.actor", "algorithm"


def why_not_joined(config: Any) -> str | None:
    """Return the setting because of which an episode cannot have several rows; None if there is none."""

    def read(key: str, default: Any) -> Any:
        value = get_value(config, key)
        return default if value is None else value

    loss, policy = read(f"{_ACTOR}.loss_agg_mode", "token-mean"), read(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    estimator = read(f"{_ALGORITHM}.adv_estimator", "grpo")
    try:
        check_loss(loss)
        if policy not in SHOWN:
            check_loss(policy)
    except CreditError as error:
        return error.message
    correction = f"{_ALGORITHM}.rollout_correction"
    of_rows = [str(read(f"{correction}.{key}", "")) for key in ("rollout_is", "rollout_rs")]
    refused = {
        f"{_ALGORITHM}.adv_estimator={estimator}: only grpo knows episodes": estimator != "grpo",
        f"{_ALGORITHM}.use_kl_in_reward: the reward of a token is not that of a turn": read(
            f"{_ALGORITHM}.use_kl_in_reward", False
        ),
        f"{correction}: sequence-level importance sampling has one ratio for a row": any("seq" in of for of in of_rows),
        f"{correction}.bypass_mode: its loss is its own": read(f"{correction}.bypass_mode", False),
        f"{_ACTOR}.shuffle would divide an episode between optimizer steps": read(f"{_ACTOR}.shuffle", False),
        "sapo takes the mean of a row": policy == "sapo" and loss != "seq-mean-token-mean",
        "distillation has a loss of its own": read("distillation.enabled", False),
    }
    if loss not in BY_TOKEN:
        why = f"counts by row in {_ACTOR}.loss_agg_mode={loss}"
        refused[f"{_ACTOR}.entropy_coeff: the entropy {why}"] = read(f"{_ACTOR}.entropy_coeff", 0) != 0
        refused[f"{_ACTOR}.use_kl_loss: the KL loss {why}"] = read(f"{_ACTOR}.use_kl_loss", False)
    return next((why for why, holds in refused.items() if holds), None)


def check_rows(config: Any, credits: Iterable[tuple[Credit, float]] = (), rewrites: str | None = None) -> None:
    """Raise if the settings do not allow what tasks declare, or what the user asked for."""
    why = why_not_joined(config) if _is_v1(config) else None
    if why and rewrites == "split":
        raise CreditError(f"rewrites: split makes several rows of an episode, and {why}", remedy="use rewrites: keep")
    if why and str(get_value(config, MODE)).startswith(PREFIX):
        raise CreditError(f"{get_value(config, MODE)} counts an episode once, and {why}", remedy=f"leave out {MODE}")
    for credit, discount in credits:
        check_turns(config, credit, discount, v1=_is_v1(config))


def check_turns(config: Any, credit: Credit, discount: float, *, v1: bool) -> None:
    """Raise if verl cannot give this credit to turns."""
    if credit == "outcome":
        return
    if not v1:
        why: str | None = "verl's v0 trainer has no credit by turn: trainer.use_v1=true has it"
    elif get_value(config, f"{_ALGORITHM}.adv_estimator") != "gae":
        why = why_not_joined(config)
    else:
        why = None if discount == 1 else "gae has no credit_discount: it has algorithm.gamma and algorithm.lam"
    if why is not None:
        raise CreditError(f"the tasks declare credit: turn, and {why}", remedy="or declare credit: outcome")


def check_trainer(config: Any, credit: Credit) -> None:
    """Raise if turns need our trainer, and it does not run."""
    if credit == "turn" and not get_value(config, JOINED) and get_value(config, f"{_ALGORITHM}.adv_estimator") != "gae":
        remedy = f"start with treetune train verl, or set {MODE}={PREFIX}sync and +{MODULES}={TRAINER}"
        raise CreditError("the tasks declare credit: turn, and verl's own trainer has none", remedy=remedy)


def _is_v1(config: Any) -> bool:
    return get_value(config, "trainer.use_v1") not in (False, "false")


def trainer_settings(config: Any) -> dict[str, str]:
    """Return the keys that make verl run our trainer; empty if it would not run it."""
    if not _is_v1(config) or why_not_joined(config):
        return {}
    mode = str(get_value(config, MODE) or "sync").removeprefix(PREFIX)
    known = [get_value(config, MODULES), os.environ.get("VERL_USE_EXTERNAL_MODULES"), TRAINER]
    modules = dict.fromkeys(name for names in known if names for name in str(names).split(","))
    return {MODE: PREFIX + mode, MODULES: ",".join(modules)}


def use_trainer(config: Any) -> None:
    """Make verl run our trainer, if the settings allow it."""
    for key, value in trainer_settings(config).items():
        set_value(config, key, value)
