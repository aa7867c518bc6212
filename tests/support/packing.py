"""How much a run tries, and how its tests are shared among workers: `pytest -n auto`.

The tests of a file stay together, as their servers, data and virtual environment are made once. Those that start
clusters of Ray, which find each other, are one group. The longest groups come first, so that no worker ends alone with
one of them.
"""

from __future__ import annotations

import os
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

MANY = os.environ.get("TREETUNE_TEST_EXAMPLES") == "many"
"""Whether tests that draw samples, statistics or long catalogues do so thoroughly."""
RAY = (
    "test_cpu_training.py",
    "test_dataset_ray.py",
    "test_pool_ray.py",
    "test_skyrl.py",
    "test_train_agent.py",
    "test_verl.py",
    "test_verl_loop.py",
)
"""What starts clusters of Ray."""
LONGEST = (
    "test_cpu_training.py",
    "test_skyrl.py",
    "test_trl.py",
    "test_os_interaction_agentbench.py",
    "test_validate_loader.py",
    "test_local_model.py",
    "test_docs.py",
    "test_prompt_dataset_skyrl.py",
    "test_verifiers_export.py",
    "test_serve_million.py",
    "test_call_tokens.py",
    "test_tokens.py",
    "test_every_trainer.py",
    "test_pool.py",
    "test_code_names.py",
    "test_serve_cli.py",
    "test_pool_faults.py",
)
"""The files that take longest, the longest of the slow suite first. The others come in the order of their names."""


def group_of(nodeid: str) -> str:
    name = PurePath(nodeid.partition("::")[0]).name
    return "ray" if name in RAY else name


def sort_longest_first(items: list[pytest.Item]) -> None:
    place = {group_of(name): at for at, name in reversed(list(enumerate(LONGEST)))}
    items.sort(key=lambda item: place.get(group_of(item.nodeid), len(LONGEST)))


def leave_the_rest_to_the_thorough_suite(items: list[pytest.Item]) -> None:
    """Of a test marked `quick_cases(n)`, n cases stay in the quick suite, spread over all; the rest are thorough."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        wanted = min(found[0].get_closest_marker("quick_cases").args[0], len(found))
        quick = {at * len(found) // wanted for at in range(wanted)}
        for at, item in enumerate(found):
            if at not in quick:
                item.add_marker(pytest.mark.thorough)


class GroupScheduling(LoadScopeScheduling):
    """xdist's own finds groups in ids that pytest 9.2 no longer lets it change, and so has no groups."""

    def __init__(self, config, log=None) -> None:
        config.option.loadscopereorder = False  # the order of collection is the one of `sort_longest_first`
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
