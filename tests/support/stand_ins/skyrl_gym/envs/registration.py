import copy
import importlib
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.core import Env


@dataclass
class EnvSpec:
    id: str
    entry_point: Any = None
    kwargs: dict = field(default_factory=dict)


registry: dict[str, EnvSpec] = {}


def register(id, entry_point=None, kwargs=None):
    if id in registry:
        raise RuntimeError(f"An environment with name `{id}` is already registered")
    registry[id] = EnvSpec(id, entry_point, kwargs or {})


def load_env_creator(name):
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def make(id, **kwargs):
    spec = registry[id]
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    env = creator(**{**copy.deepcopy(spec.kwargs), **kwargs})
    assert isinstance(env, Env)
    return env
