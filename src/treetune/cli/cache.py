"""`treetune cache`: lists the files that were built, shows what they were built from, and removes them."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from treetune.cli.options import CacheDir, Json, option
from treetune.cli.output import figure, make_table, print_json
from treetune.config.structs import dump_yaml, to_plain
from treetune.data.rows.cache import Cache, CacheEntry
from treetune.errors import UnknownNameError, UsageError
from treetune.system.folders import default_cache_dir, measure_kept, prune_kept
from treetune.system.screen import Screen

cache_app = typer.Typer()
_BESIDE = {"verdicts": ("verdicts/*/*", "verdicts of judges"), "runs": ("runs/*", "traces of other programs' runs")}
"""The other contents of the cache: their folders and what they are."""


@cache_app.command("list")
def list_command(cache_dir: CacheDir = None, json: Json = False) -> None:
    """List built files with their sizes, most recently used first; also the verdicts of judges and the traces of other
    programs' runs."""
    cache = Cache(default_cache_dir(cache_dir))
    entries = cache.entries()
    total = f"{len(entries)} built" if entries else "nothing is built"
    beside = {name: measure_kept(cache.folder, pattern) for name, (pattern, _) in _BESIDE.items()}
    _report(cache, entries, ("entries", "size"), f"{total} in {cache.folder}", json, beside)


@cache_app.command("show")
def show_command(
    key: Annotated[str, typer.Argument(help="The key or its beginning, as shown by `treetune cache list`.")],
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Show what one file was built from: config, source, revision, rows, versions."""
    cache = Cache(default_cache_dir(cache_dir))
    entry = _find(cache, key)
    if json:
        return print_json({**_entry_to_json(cache, entry), "sidecar": entry.sidecar})
    screen = Screen()
    screen.say(f"{cache.path(entry.key)}: {_state(entry)}", style="bold")
    return screen.say(dump_yaml(to_plain(entry.sidecar)).rstrip("\n")) if entry.sidecar is not None else None


@cache_app.command("prune")
def prune_command(
    older_than: Annotated[
        float | None,
        option("Remove files not used for DAYS days, and verdicts and runs of that age.", metavar="DAYS", min=0),
    ] = None,
    all: Annotated[bool, option("Remove everything.", "--all")] = False,
    damaged: Annotated[
        bool, option("Remove damaged files, and files that a killed build left behind.", "--damaged")
    ] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Remove built files, the verdicts of judges, and the traces of other programs' runs, which are read again when
    such a run is opened. Files that are being built are kept."""
    if older_than is None and not all and not damaged:
        raise UsageError("nothing is selected", remedy="pass --older-than DAYS, --damaged or --all")
    cache = Cache(default_cache_dir(cache_dir))
    removed = cache.prune(older_than_days=older_than, all=all, damaged=damaged)
    beside = dict.fromkeys(_BESIDE, (0, 0))
    if all or older_than is not None:
        days = None if all else older_than
        beside = {name: prune_kept(cache.folder, pattern, days) for name, (pattern, _) in _BESIDE.items()}
    total = f"{len(removed)} removed from {cache.folder}, freed" if removed else "nothing to remove"
    _report(cache, removed, ("removed", "freed"), total, json, beside)


def _find(cache: Cache, wanted: str) -> CacheEntry:
    entries = {entry.key: entry for entry in cache.entries()}
    found = fnmatch.filter(entries, f"{wanted.replace('_', '*_')}*")  # a short key abbreviates both halves
    if not found:
        known = [_short(key) for key in entries]
        raise UnknownNameError.of("key", wanted, known, remedy="`treetune cache list` shows the keys")
    if len(found) > 1:
        names = ", ".join(found)
        raise UsageError(f"{wanted!r} matches {len(found)} keys: {names}", remedy="write more of the key")
    return entries[found[0]]


def _short(key: str) -> str:
    """All tasks of one class share the first half of the key, so a part of the second half is needed to tell them
    apart."""
    code, _, config = key.partition("_")
    return f"{code[:6]}_{config[:8]}"


def _state(entry: CacheEntry) -> str:
    return f"{entry.state} ({entry.fault})" if entry.fault else str(entry.state)


def _entry_to_json(cache: Cache, entry: CacheEntry) -> dict[str, Any]:
    shown = ("rows", "size", "source", "created", "last_used", "state", "fault")
    return {"key": entry.key, "path": str(cache.path(entry.key)), **{name: getattr(entry, name) for name in shown}}


def _report(
    cache: Cache,
    entries: list[CacheEntry],
    names: tuple[str, str],
    total: str,
    json: bool,
    beside: Mapping[str, tuple[int, int]],
) -> None:
    """Shows entries and their size; `names` are the keys of both in JSON, `total` is the summary line. `beside` has the
    number and size of the other contents of the cache."""
    size = sum(entry.size for entry in entries)
    if json:
        listed = [_entry_to_json(cache, entry) for entry in entries]
        found = {name: {"number": number, "size": bytes} for name, (number, bytes) in beside.items()}
        return print_json({"cache_dir": str(cache.folder), names[0]: listed, names[1]: size, **found})
    screen = Screen()
    rows = []
    for entry in entries:
        count, used = figure(entry.rows, ","), _ago(time.time() - entry.last_used)
        rows.append((_short(entry.key), count, decimal(entry.size), entry.source, used, _state(entry)))
    if entries:
        screen.print(make_table(rows, ("key", "rows", "size", "source", "used", "state"), right=("rows", "size")))
    screen.say(f"{total}: {decimal(size)}")
    for name, (number, bytes) in beside.items():
        if number:
            screen.say(f"{_BESIDE[name][1]}: {number:,}, {decimal(bytes)}")


def _ago(seconds: float) -> str:
    for unit, length in {"d": 86400, "h": 3600, "min": 60}.items():
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
