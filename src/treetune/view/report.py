"""The files of the pages, and runs as one page in a file that needs nothing else: `treetune view RUN --export FILE`.

    made = write_report(calls, Path("report.html"), where="failed")
    made.note             # what was left out, if anything

The pages are part of the package: plain modules, a style sheet, and the libraries they use. In a file, they ask the
file instead of a server: it contains the answers to their calls, up to a size limit. Beyond it, only the rollouts that
a query selects are kept; without a query, those of the groups with the highest variance.
"""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import TreetuneError, UsageError, writing
from treetune.runs.run import Run
from treetune.system.folders import write_atomically
from treetune.system.http_error import encode
from treetune.view.calls import Body, Calls, OfRollout, OfRun, OfRuns, OfTask
from treetune.view.run_list import ShownRun
from treetune.view.tables import list_groups, row_of

TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "json": b"application/json",
    "txt": b"text/plain; charset=utf-8",
}
_PACKED = ".gz"
_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";?', re.M)
_EXPORTED = re.compile(r"(?:^|(?<=[;}]))export (?=(?:async function|function|class|const)\s+(\w+))", re.M)
_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?\s*$")
_OTHER = re.compile(r"(?:^|(?<=[;}]))(?:import|export)\b.*|\bimport\s*[(.].*", re.M)


def page_files() -> Iterator[tuple[str, bytes]]:
    """The content of each file by its path below `page/`."""
    for name in page_names():
        yield name, read_page(name)


@cache
def page_names() -> tuple[str, ...]:
    return tuple(sorted(set(_names_below(_folder(), ""))))


def read_page(name: str) -> bytes:
    """The content of one of `page_names`. Raises KeyError for any other name."""
    if name not in page_names():
        raise KeyError(name)
    file, packed = (_folder().joinpath(*f"{name}{ending}".split("/")) for ending in ("", _PACKED))
    content: bytes = file.read_bytes() if file.is_file() else gzip.decompress(packed.read_bytes())
    return content


def _folder() -> Any:
    return resources.files("treetune.view").joinpath("page")


def _names_below(folder: Any, before: str) -> Iterator[str]:
    for entry in folder.iterdir():
        name = f"{before}{entry.name}"
        if entry.is_dir():
            yield from _names_below(entry, f"{name}/")
        elif name.removesuffix(_PACKED).rpartition(".")[2] in TYPES:
            yield name.removesuffix(_PACKED)


# Bundling all modules into one script


def bundle(first: str, modules: Mapping[str, str]) -> str:
    """Turns each module into a function that returns its exports; imported modules come first. Raises for a form of
    import or export that our modules do not use."""
    done: dict[str, str] = {}
    _add(first, modules, done, ())
    return "\n".join(done.values())


def _add(name: str, modules: Mapping[str, str], done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in done:
        return
    if name in above:
        raise TreetuneError(f"modules of the page import each other: {' -> '.join((*above, name))}")
    if name not in modules:
        raise TreetuneError(f"{above[-1] if above else 'the page'} imports {name}, which does not exist")

    def imported(found: re.Match[str]) -> str:
        names, place = found.groups()
        other = posixpath.normpath(posixpath.join(posixpath.dirname(name), place))
        _add(other, modules, done, (*above, name))
        return f"const {{ {_renamed(names, ': ')} }} = {_variable(other)};"

    exported: list[str] = []

    def listed(found: re.Match[str]) -> str:
        pairs = [part.split(" as ") for part in found[1].split(",") if part.strip()]
        exported.extend(f"{pair[-1].strip()}: {pair[0].strip()}" for pair in pairs)
        return ""

    def declared(found: re.Match[str]) -> str:
        exported.append(found[1])
        return ""

    text = _IMPORT.sub(imported, modules[name])
    text = _EXPORTED.sub(declared, _LIST.sub(listed, text))
    if (other := _OTHER.search(text)) is not None:
        raise TreetuneError(f"{name} uses an unknown form of import or export: {other[0][:80]}")
    done[name] = f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _renamed(names: str, between: str) -> str:
    return ", ".join(between.join(part.split(" as ")).strip() for part in names.split(",") if part.strip())


# A report


MOST_BYTES = 20_000_000
"""The maximum size in bytes of the answers in a file."""
_GROUPS_SHARE, _PAIRS_SHARE = 0.25, 0.25
"""The shares of this size for the lines of groups, and for both runs' answers to tasks that changed."""
_MOST_RUNS = 16
_LOOK_SECONDS = 20.0
"""How long to search a long run for suspicious rollouts; the report says how many were not checked."""
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; connect-src 'none'; "
    "base-uri 'none'; form-action 'none'"
)
_LIBRARIES = ("vendor/uplot.js", "vendor/markdown-it.js", "vendor/temml.js")
"""Scripts that are not modules."""


class ExportedReport(msgspec.Struct):
    path: Path
    rollouts: int
    of: int
    size: int
    note: str | None


def write_report(calls: Calls, path: Path, where: str = "", most_bytes: int = MOST_BYTES) -> ExportedReport:
    runs = list(calls.shown)
    if not runs:
        raise UsageError("there is no run to export", remedy="name a run folder")
    if len(runs) > _MOST_RUNS:
        raise UsageError(f"{len(runs)} runs are too many for one file", remedy=f"name at most {_MOST_RUNS} of them")
    kept = _Answers(calls, where)
    if len(runs) > 1:
        most_bytes -= kept.compare([shown.id for shown in runs], int(_PAIRS_SHARE * most_bytes))
    for shown in runs:
        kept.add(shown, most_bytes // len(runs))
    content = make_page(kept.answers())
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return ExportedReport(path, kept.rollouts, kept.of, len(content), kept.note)


class _Answers:
    """The answers in a file, by call and by argument."""

    def __init__(self, calls: Calls, where: str) -> None:
        self._calls, self._where = calls, where
        self._by_call: dict[str, dict[str, msgspec.Raw]] = {}
        self.rollouts = self.of = 0

    @property
    def note(self) -> str | None:
        chosen = f"those that match {self._where!r}" if self._where else "those of the groups with the highest variance"
        if self.rollouts == self.of:
            return f"This file holds {chosen}." if self._where else None
        return f"This file contains {self.rollouts:,} of {self.of:,} rollouts: {chosen}, as many as fit."

    def answers(self) -> bytes:
        single = {"runs": self._calls.runs(Body()), "words": self._calls.words(Body()), "note": self.note}
        return encode({**single, **self._by_call})

    def _keep(self, call: str, key: str, answer: Any) -> int:
        encoded = encode(answer)
        self._by_call.setdefault(call, {})[key] = msgspec.Raw(encoded)
        return len(encoded)

    def add(self, shown: ShownRun, room: int) -> None:
        """Adds the answers of a run, in about `room` bytes."""
        id, asked = str(shown.id), OfRun(run=shown.id)
        left = room - self._keep("run", id, self._calls.run(asked))
        until = time.monotonic() + _LOOK_SECONDS
        while (suspicious := self._calls.suspicious(asked))["left"] and time.monotonic() < until:
            pass
        left -= self._keep("suspicious", id, suspicious)
        with shown.open() as run:
            groups = list_groups(run, self._where, "variance", True, 0, len(run))
            rows = _while_room(groups["rows"], int(_GROUPS_SHARE * room))
            left -= self._keep("groups", id, {**groups, "total": len(rows), "rows": rows})
            self._add_rollouts(run, shown.id, rows, left)

    def _add_rollouts(self, run: Run, id: int, groups: list[dict[str, Any]], left: int) -> None:
        fits = run.fits(self._where)
        self.of += int(fits.sum())
        kept: list[int] = []
        for at in (cell["at"] for group in groups for cell in group["cells"] if fits[cell["at"]]):
            parts = [("rollout", f"{id}/{at}", self._calls.rollout(OfRollout(run=id, at=at)))]
            if parts[0][2]["has_tokens"]:
                parts.append(("tokens", f"{id}/{at}", self._calls.tokens(OfRollout(run=id, at=at))))
            size = sum(len(encode(answer)) for _, _, answer in parts)
            if size > left:
                continue  # a smaller one may still fit
            left -= size
            kept.append(at)
            for part in parts:
                self._keep(*part)
        self.rollouts += len(kept)
        self._keep("rollouts", str(id), {"total": len(kept), "rows": [row_of(run, at) for at in sorted(kept)]})

    def compare(self, ids: list[int], room: int) -> int:
        """Compares the first run with the others, in about `room` bytes; returns how many were used."""
        try:
            compared = self._calls.compare(OfRuns(runs=ids))
        except TreetuneError:
            return 0  # they have no task in common
        left = room - self._keep("compare", ",".join(map(str, ids)), compared)
        for found in compared:
            pair = [found["before"], found["after"]]
            for task in found["tasks"]:
                if task["kind"] == "unchanged" or left <= 0:
                    break  # changed tasks come first
                uid, occurrence = task["uid"], task["occurrence"]
                asked = OfTask(runs=pair, uid=uid, occurrence=occurrence)
                key = f"{','.join(map(str, pair))}/{uid}/{occurrence}"
                left -= self._keep("pair", key, self._calls.pair(asked))
        return room - left


def _while_room(rows: list[dict[str, Any]], room: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for row in rows:
        room -= len(encode(row))
        if room < 0 and kept:
            break
        kept.append(row)
    return kept


def make_page(answers: bytes) -> bytes:
    """Builds the self-contained page. Only our own scripts and styles may run; they are named by their hashes."""
    files = {name: content.decode() for name, content in page_files() if name.endswith((".js", ".css"))}
    style = files["style.css"]
    modules = {name: text for name, text in files.items() if name.endswith(".js") and name not in _LIBRARIES}
    scripts = [_escape_ends(files[name]) for name in _LIBRARIES] + [_escape_ends(bundle("app.js", modules))]
    policy = _POLICY.format(scripts=" ".join(map(_hash, scripts)), styles=_hash(style))
    *libraries, script = scripts
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<title>Treetune</title><link rel="icon" href="data:,"><style>{style}</style></head><body>'
        "<noscript>This page needs JavaScript.</noscript>"
    )
    # Model text is JSON with every < escaped, so no text can end the element or begin another one.
    data = b'<script type="application/json" id="kept">' + answers.replace(b"<", b"\\u003c") + b"</script>"
    tail = "".join(f"<script>{library}</script>" for library in libraries)
    tail += f'<script type="module">{script}</script></body></html>'
    return head.encode() + data + tail.encode()


def _escape_ends(script: str) -> str:
    """A script with every `</script` and `<!--` escaped."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
