"""`treetune cache`: what was built, what it was built from, and room again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from treetune.rows.cache import Cache, Entry
    from treetune.rows.loading import DatasetCopy

cache_app = typer.Typer(
    help="Built datasets: list them, show what one was built from, remove them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="The cache (TREETUNE_TASK_CACHE_DIR, else ~/.cache/treetune/tasks)."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@cache_app.command("list")
def list_command(cache_dir: CacheDir = None, json: Json = False) -> None:
    """Everything that was built, last used first, and how much room it takes."""
    from rich.filesize import decimal

    from treetune.cli.output import console_for, print_json
    from treetune.rows.loading import copies_folder, list_copies

    cache = _cache(cache_dir)
    entries, kept = cache.entries(), list_copies(cache.folder)
    size = sum(entry.size for entry in entries)
    if json:
        shown = [_to_json(cache, entry) for entry in entries]
        return print_json(
            {"cache_dir": str(cache.folder), "size": size, "entries": shown, "copies": _copies_to_json(kept)}
        )
    total = (
        f"{len(entries)} built in {cache.folder}, {decimal(size)}" if entries else f"nothing is built in {cache.folder}"
    )
    if kept:
        room = decimal(sum(copy.size for copy in kept))
        total += (
            f"\n{len(kept)} copies of source files in {copies_folder(cache.folder)}, {room}; prune removes them too"
        )
    return _print(console_for(False), entries, total)


@cache_app.command("show")
def show_command(
    key: Annotated[str, typer.Argument(help="The key or its beginning, as `treetune cache list` shows it.")],
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """What built one file: config, source, revision, rows, versions."""
    from treetune.cli.output import console_for, print_json
    from treetune.config import dump_yaml, to_plain

    cache = _cache(cache_dir)
    entry = _find(cache, key)
    if json:
        return print_json({**_to_json(cache, entry), "sidecar": entry.sidecar})
    console = console_for(False)
    console.print(f"{cache.path(entry.key)}: {_state(entry)}", markup=False, soft_wrap=True, style="bold")
    if entry.sidecar is not None:
        console.print(dump_yaml(to_plain(entry.sidecar)), markup=False, soft_wrap=True, end="")
    return None


@cache_app.command("prune")
def prune_command(
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", min=0, help="What was not used for so many days.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="What is damaged, or left by a killed build.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Remove built files, and the copies of their sources that the datasets library keeps. What is being built right
    now stays."""
    from rich.filesize import decimal

    from treetune.cli.output import console_for, print_json
    from treetune.errors import UsageError
    from treetune.rows.loading import prune_copies

    if older_than is None and not all and not damaged:
        raise UsageError("nothing is selected", remedy="pass --older-than DAYS, --damaged or --all")
    cache = _cache(cache_dir)
    removed = cache.prune(older_than_days=older_than, all=all, damaged=damaged)
    copies = prune_copies(cache.folder, older_than_days=older_than, all=all)
    freed = sum(entry.size for entry in removed) + sum(copy.size for copy in copies)
    if json:
        shown = [_to_json(cache, entry) for entry in removed]
        removals = {"freed": freed, "removed": shown, "copies": _copies_to_json(copies)}
        return print_json({"cache_dir": str(cache.folder), **removals})
    total = f"{len(removed)} removed from {cache.folder}, with {len(copies)} copies of sources; {decimal(freed)} freed"
    return _print(console_for(False), removed, total if removed or copies else "nothing to remove")


def _cache(cache_dir: Path | None) -> Cache:
    from treetune.rows.cache import Cache, default_cache_dir

    return Cache(default_cache_dir(cache_dir))


def _find(cache: Cache, wanted: str) -> Entry:
    from treetune.errors import UnknownNameError, UsageError, closest

    entries = {entry.key: entry for entry in cache.entries()}
    found = [entry for key, entry in entries.items() if _matches(key, wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(entry.key for entry in found)
        raise UsageError(f"{wanted!r} is the beginning of {len(found)} keys: {names}", remedy="write more of it")
    # Only as much of each key is compared as was written, in the two spellings that are understood.
    beginnings = {spelling[: len(wanted)]: spelling for key in entries for spelling in (key, _short(key))}
    near = list(dict.fromkeys(beginnings[name] for name in closest(wanted, beginnings)))
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UnknownNameError(f"no key begins with {wanted!r}{hint}", remedy="`treetune cache list` shows what there is")


def _matches(key: str, wanted: str) -> bool:
    """Whether `wanted` is the beginning of a key or, as in a shortened one, of both its halves."""
    (code, _, config), (code_wanted, _, config_wanted) = key.partition("_"), wanted.partition("_")
    return code.startswith(code_wanted) and config.startswith(config_wanted)


def _short(key: str) -> str:
    """All tasks of one class share the first half, so some of the second is needed to tell them apart."""
    code, _, config = key.partition("_")
    return f"{code[:6]}_{config[:8]}"


def _state(entry: Entry) -> str:
    return f"{entry.state} ({entry.fault})" if entry.fault else str(entry.state)


def _to_json(cache: Cache, entry: Entry) -> dict[str, Any]:
    shown = ("rows", "size", "source", "created", "last_used", "state", "fault")
    return {"key": entry.key, "path": str(cache.path(entry.key)), **{name: getattr(entry, name) for name in shown}}


def _copies_to_json(copies: Iterable[DatasetCopy]) -> list[dict[str, Any]]:
    return [{"path": str(copy.path), "size": copy.size, "last_used": copy.last_used} for copy in copies]


def _print(console: Console, entries: list[Entry], total: str) -> None:
    import time

    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "rows", "size", "source", "used", "state"):
        table.add_column(heading, justify="right" if heading in ("rows", "size") else "left")
    for entry in entries:
        rows = "-" if entry.rows is None else f"{entry.rows:,}"
        used = _ago(time.time() - entry.last_used)
        table.add_row(_short(entry.key), rows, decimal(entry.size), Text(entry.source), used, Text(_state(entry)))
    if entries:
        console.print(table)
    console.print(total, markup=False, soft_wrap=True)


def _ago(seconds: float) -> str:
    for unit, length in {"d": 86400, "h": 3600, "min": 60}.items():
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
