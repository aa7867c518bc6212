"""By which of its arguments a GRPOTrainer plays tasks: the one that fits them.

way, why = choose(openings)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from treetune.chat.images import has_images
from treetune.chat.message import begins_answer
from treetune.trainers.trl.dataset import Opening

Way = Literal["reward_funcs", "rollout_func", "environment_factory"]
WAYS: tuple[Way, ...] = ("reward_funcs", "rollout_func", "environment_factory")


def choose(openings: Sequence[Opening]) -> tuple[Way, str]:
    """The way, and why it is that one."""
    with_tools = any(opening.tools for opening in openings)
    if any(has_images(opening.messages) for opening in openings):
        if with_tools:
            return "environment_factory", "prompts have images and tasks have tools; rollouts here are text alone"
        return "reward_funcs", "prompts have images, and rollouts here are text alone"
    if with_tools:
        return "rollout_func", "tasks have tools, and a rollout ends with its episode, whatever the chat template"
    if any(begins_answer(opening.messages) for opening in openings):
        return "rollout_func", "prompts end with the beginning of an answer"
    if all(opening.one_answer for opening in openings):
        return "reward_funcs", "each task is one answer, which needs nothing else"
    return "rollout_func", "episodes may have several turns"
