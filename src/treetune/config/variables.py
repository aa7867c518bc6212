"""Config values from environment variables. Where the config is shown or saved, they appear as they were written.

    resolve(OmegaConf.create({"key": "${oc.env:SECRET}"}))      # {"key": "s3cret"}
    conceal({"key": "s3cret"})                                  # {"key": "${oc.env:SECRET}"}

A value is recognised by its key and its text, in the process that resolved it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treetune.errors import UntrustedCode, UsageError

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
