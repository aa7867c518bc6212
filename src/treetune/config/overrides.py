"""Dotted overrides and interpolations: converts YAML to plain values, once.

data = with_overrides(load_yaml("eval.yaml"), {"sampling.temperature": "0.7"})     # resolved: `${` is now plain text
data = override_values(data, {"taskset.level": "2"})                               # override resolved values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from treetune.config.variables import explain_interpolation, resolve
from treetune.errors import ConfigError


def with_overrides(
    data: Mapping[str, Any], overrides: Mapping[str, str], *, source: str = "config", only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Apply overrides `{"a.b": "value"}` (values spelled as in YAML) to `data` as read from a YAML file, and resolve
    its interpolations. With `only`, return just these keys and leave the rest unresolved. The result has plain values
    and must not be passed to this function again, which would resolve an escaped `${` in it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = _lay_overrides(dict(data), overrides)
    try:
        if only is not None:
            parts = {key: config[key] for key in only}
            return {key: resolve(part) if OmegaConf.is_config(part) else part for key, part in parts.items()}
        return cast(dict[str, Any], resolve(config))
    except OmegaConfBaseException as error:
        key, problem = explain_interpolation(error)
        raise ConfigError([(f"--{key}" if key in overrides else key, problem)], source=source) from None


def _lay_overrides(data: dict[str, Any], overrides: Mapping[str, str]) -> Any:
    """An OmegaConf config with the overrides, not yet resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    config = OmegaConf.create(data)
    try:
        for key, raw in overrides.items():
            try:
                parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]), resolve=False)
                value = parsed["value"]
            except YAMLError:
                value = raw  # text that resembles YAML, such as "{question}!"
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        problem = explain_interpolation(error)[1] if "${" in raw else f"cannot be set to {raw!r}: {error}"
        raise ConfigError([(key, problem)], source="the overrides") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError([(key, f"cannot be set to {raw!r}: {error}")], source="the overrides") from None
    return config


# Overrides of resolved values


def override_values(data: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Apply overrides to resolved values. Only the overrides are resolved, because `data` may contain `${` as text."""
    return cast(dict[str, Any], deep_merge(data, with_overrides({}, overrides, source="the overrides")))


def select_overridden(data: Any, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Only those resolved values that the overrides set, nested as `deep_merge` expects."""
    from omegaconf import OmegaConf

    given = OmegaConf.to_container(_lay_overrides({}, overrides), resolve=False)
    return cast(dict[str, Any], _select(data, given))


def _select(value: Any, given: Any) -> Any:
    if isinstance(given, Mapping) and isinstance(value, Mapping):
        return {key: _select(value[key], item) for key, item in given.items() if key in value}
    if isinstance(value, list) and _names_entries(given):
        return {key: _select(value[int(key)], item) for key, item in given.items()}
    return value


def deep_merge(base: Any, given: Any, path: str = "") -> Any:
    """Merge two mappings recursively; `given` takes precedence. `{"0": ...}` changes the first entry of a list."""
    if isinstance(base, list) and _names_entries(given):
        laid = list(base)
        for key, value in given.items():
            if int(key) >= len(laid):
                problem = f"there is no entry {key}: there are {len(laid)}, counted from 0"
                raise ConfigError([(f"{path}[{key}]", problem)], source="the overrides")
            laid[int(key)] = deep_merge(laid[int(key)], value, f"{path}[{key}]")
        return laid
    if not (isinstance(base, Mapping) and isinstance(given, Mapping)):
        return given
    inside = f"{path}." if path else ""
    return {**base, **{key: deep_merge(base.get(key), value, f"{inside}{key}") for key, value in given.items()}}


def _names_entries(given: Any) -> bool:
    return isinstance(given, Mapping) and bool(given) and all(str(key).isdecimal() for key in given)
