"""Which rows to keep: an expression, a function in a file, pass rates of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from treetune.datasets.config import filter_file
from treetune.datasets.expression import Filter
from treetune.errors import ConfigError
from treetune.plugins import load_object


def row_filter(
    spec: str | None, columns: list[str], with_pass_rate: bool
) -> tuple[Callable[[dict[str, Any]], Any] | None, bool]:
    """The filter, and whether it can only run once the uid is known."""
    if spec is None:
        return None, False
    if filter_file(spec) is not None:
        function = load_object(spec)
        if not callable(function):
            raise ConfigError([("filter", f"{spec} is a {type(function).__name__}, not a function")])
        return function, with_pass_rate
    names = [*columns, "pass_rate"] if with_pass_rate else columns
    parsed = Filter.parse(spec, names)
    # A column of that name is the dataset's own, unless rates were given.
    return parsed.keeps, with_pass_rate and "pass_rate" in parsed.columns


def read_pass_rates(path: str) -> dict[str, float]:
    """What `treetune eval --write-pass-rate` wrote: a line of JSON per uid."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
        return {entry["uid"]: float(entry["pass_rate"]) for entry in map(msgspec.json.decode, lines)}
    except OSError as error:
        raise ConfigError([("pass_rates", f"cannot read {path}: {error.strerror}")]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError([("pass_rates", f"{path} is no pass-rate file: {error}")]) from None
    except (KeyError, TypeError, ValueError):
        problem = f'{path} is no pass-rate file: a line is not {{"uid": ..., "pass_rate": ...}}'
        raise ConfigError([("pass_rates", problem)]) from None
