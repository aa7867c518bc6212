"""Interpolations and overrides: converts YAML to plain values, once, and back to what the user wrote.

    data = with_overrides(load_yaml("eval.yaml"), {"sampling.temperature": "0.7"})  # resolved: `${` is plain text
    data = override_values(data, {"taskset.level": "2"})           # override resolved values
    conceal({"key": "s3cret"})                                     # {"key": "${oc.env:SECRET}"}

Where a config is shown or saved, values from environment variables appear as they were written. Such a value is
recognised by its key and its text, in the process that resolved it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from treetune.errors import ConfigError, UntrustedCode, UsageError

_MARK = "$env"
_VARIABLE = re.compile(r"(?<!\\)(?:\\\\)*\$\{oc\.env:\s*([A-Za-z_]\w*)")
"""Matches variables that are not escaped."""
_spellings: dict[tuple[str, str], str] = {}
"""How a value was written, by its key and its text."""


def resolve(config: Any) -> Any:
    """Convert an OmegaConf config to plain values, with every interpolation resolved."""
    from omegaconf import OmegaConf

    written, resolved = (OmegaConf.to_container(config, resolve=resolve) for resolve in (False, True))
    whole = OmegaConf.to_container(config._get_root(), resolve=False)
    used = {name for text in texts_of(whole) for name in _VARIABLE.findall(text)}
    values = {value: f"${{oc.env:{name}}}" for name in sorted(used) if (value := os.environ.get(name))}
    if values:
        anywhere = re.compile("|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)))
        for key, before, after in _pair_texts(written, resolved):
            if "${" in before and anywhere.search(after):
                parts = re.split(f"({anywhere.pattern})", after)
                _spellings[key, after] = "".join(values.get(part) or escape_text(part) for part in parts)
    return resolved


def explain_interpolation(error: Exception) -> tuple[str, str]:
    """The key whose `${` OmegaConf cannot resolve, and the problem with its remedy."""
    reason = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    remedy = "`${` begins a reference to a key or a variable; for plain text write `\\${`, in double quotes `\\\\${`"
    return str(getattr(error, "full_key", None) or ""), f"{reason}; {remedy}"


def map_texts(value: Any, change: Callable[[str, str], Any], key: str = "") -> Any:
    """Change each text in plain values; `change` receives the text and the key above it."""
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, Mapping):
        return {name: map_texts(item, change, str(name)) for name, item in value.items()}
    return [map_texts(item, change, key) for item in value] if isinstance(value, list | tuple) else value


def conceal(value: Any, key: str = "") -> Any:
    """Replace values from the environment by the variables they were written as."""
    return map_texts(value, lambda text, key: _spellings.get((key, text), text), key)


def mark_variables(value: Any) -> Any:
    """Replace values from the environment by `{"$env": "${oc.env:X}"}`, for places where `${` is only text."""
    return map_texts(value, lambda text, key: {_MARK: _spellings[key, text]} if (key, text) in _spellings else text)


def fill_variables(value: Any, *, trust: bool) -> Any:
    """The reverse of `mark_variables`, in another process. Raises without `trust`, because data from elsewhere must not
    read variables."""
    if isinstance(value, Mapping):
        if value.keys() == {_MARK}:
            if not trust:
                problem = f"a row reads a variable of your environment: {value[_MARK]}"
                raise UntrustedCode(problem, remedy="pass --trust (in a trainer's processes: TREETUNE_TRUST=1)")
            return _read(str(value[_MARK]))
        return {name: fill_variables(item, trust=trust) for name, item in value.items()}
    return [fill_variables(item, trust=trust) for item in value] if isinstance(value, list) else value


def _read(spelling: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return resolve(OmegaConf.create({"value": spelling}))["value"]
    except OmegaConfBaseException as error:
        raise UsageError(str(error).splitlines()[0], remedy="set it where rows are scored too") from None


def escape(value: Any) -> Any:
    """Escape text for YAML, so that it is read back unchanged: a literal `${` would be an interpolation."""
    return map_texts(value, _escape_literal)


def _escape_literal(text: str, key: str) -> str:
    spelling = _spellings.get((key, text), text)
    return spelling if spelling is not text or is_spelling(text, key) else escape_text(text)


def escape_texts(value: Any) -> Any:
    """Escape all texts in plain values for OmegaConf, so that they come back unchanged."""
    return map_texts(value, lambda text, key: escape_text(text))


def escape_text(text: str) -> str:
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def is_spelling(text: str, key: str) -> bool:
    """Whether a text is the original spelling of a value of this key."""
    return "${" in text and any(key == known and text == spelling for (known, _), spelling in _spellings.items())


def _pair_texts(written: Any, resolved: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Pair the leaves as written with their resolved values; an interpolation may have become several leaves."""
    if isinstance(resolved, Mapping):
        for name, item in resolved.items():
            yield from _pair_texts(written[name] if isinstance(written, Mapping) else written, item, str(name))
    elif isinstance(resolved, list):
        for number, item in enumerate(resolved):
            yield from _pair_texts(written[number] if isinstance(written, list) else written, item, key)
    else:
        yield key, str(written), str(resolved)


def texts_of(value: Any) -> Iterator[str]:
    """The leaves that are not containers, as text."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(item)
    else:
        yield str(value)


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
    if not overrides:
        return dict(data)  # OmegaConf takes 60 ms to import
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
