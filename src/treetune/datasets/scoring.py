"""Who scores the rows of a verl config: verl itself, our reward function, or something else that the config names.

scoring_of(config)              # Scoring.VERL: the config says nothing
score_by_tasks(config)          # from now on each row is scored by its own task
problems(config, tasksets)      # data sources that would not be scored, before the model is loaded
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from treetune.datasets.taskset import DatasetTaskset

OURS = "pkg://treetune.trainers.verl"
"""How a verl config names our reward function."""

VERL_SOURCES = frozenset(
    "openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo math "
    "math_dapo_reasoning numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 "
    "numina_olympiads codecontests apps codeforces taco hiyouga/geometry3k searchR1_nq searchR1_triviaqa "
    "searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle".split()
)
"""The data sources that verl 0.9 scores by itself; besides these, every name that begins with `aime`."""

_SCORABLE = "set ground_truth or env_class, or write reward(task, answer) in a custom_cls"

_LEAVE = (
    "to leave scoring to something else, name it in the config (reward.custom_reward_function.path, "
    "reward.reward_model.enable=true, or reward.reward_manager.source=importlib) or set leave_scoring: true"
)


class Scoring(StrEnum):
    UNKNOWN = "unknown"
    """It is no trainer's config."""
    VERL = "verl"
    """Nothing is named: verl looks at the data source."""
    TASKS = "tasks"
    """Our reward function."""
    OTHER = "other"
    """Another function, a reward model, a reward manager of the user's own, or `leave_scoring`."""


class Problem(NamedTuple):
    message: str
    remedy: str


def scoring_of(config: Any) -> Scoring:
    reward = config.get("reward")
    if config.get("leave_scoring") or (_is_node(reward) and _has_own_way(reward)):
        return Scoring.OTHER
    # verl keeps an empty node in one place where the user writes into the other.
    places = [place.get("custom_reward_function") for place in (reward, config) if _is_node(place)]
    nodes = [place for place in places if _is_node(place)]
    paths = [str(node["path"]) for node in nodes if node.get("path")]
    if not nodes:
        return Scoring.UNKNOWN
    return Scoring.VERL if not paths else Scoring.TASKS if paths[0] == OURS else Scoring.OTHER


def score_by_tasks(config: Any) -> Any:
    """Name our reward function in a verl config that names no other way of scoring; nothing else is touched."""
    if scoring_of(config) is not Scoring.VERL:
        return config
    place = config["reward"] if _is_node(config.get("reward")) else config
    function = {"path": OURS, "name": "compute_score"}
    if isinstance(config, dict):
        place["custom_reward_function"] = {**(place.get("custom_reward_function") or {}), **function}
        return config
    from omegaconf import OmegaConf

    for key, value in function.items():
        OmegaConf.update(place, f"custom_reward_function.{key}", value, force_add=True)
    return config


def problems(config: Any, tasksets: Iterable[DatasetTaskset]) -> Iterator[Problem]:
    """The data sources whose rows nothing would score."""
    scoring = scoring_of(config)
    if scoring is Scoring.OTHER:
        return
    for taskset in tasksets:
        data_source = taskset.config.data_source
        if taskset.scorer is None:
            yield Problem(
                f"nothing here can score data_source {data_source!r}: it has no ground truth", f"{_SCORABLE}; {_LEAVE}"
            )
        elif scoring is Scoring.VERL and not knows_data_source(data_source):
            yield Problem(
                f"verl itself cannot score data_source {data_source!r}",
                f"call score_by_tasks(config), or set reward.custom_reward_function to {{path: {OURS}, name: "
                f"compute_score}}; {_LEAVE}",
            )


def knows_data_source(data_source: str) -> bool:
    """Whether verl 0.9 scores rows of this source by itself."""
    return data_source in VERL_SOURCES or data_source.startswith("aime")


def _has_own_way(reward: Mapping[str, Any]) -> bool:
    model, manager = reward.get("reward_model") or {}, reward.get("reward_manager") or {}
    return bool(model.get("enable")) or manager.get("source") == "importlib"


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping)
