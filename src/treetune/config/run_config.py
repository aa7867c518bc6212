"""The config of a run folder as a TARGET. It decides what code runs, and may come from anyone.

    origin_of("runs/x/config.yaml", data)       # USER if an `eval` of this user wrote it

An `eval` of this user records a mark in the cache folder, made from the parts of the config that could do harm. A
config without a mark may only name built-in or installed code, and may not read variables or choose servers to call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treetune.config.code_reference import FILE_SCHEME, MODULE_SCHEME
from treetune.config.trust import USER, Origin, is_own_config, trusts
from treetune.config.variables import texts_of
from treetune.errors import UntrustedCode

CONFIG, FINGERPRINT, SUMMARY = "config.yaml", "fingerprint.json", "summary.json"
TRACE_LINES, CHECK_LINES = "traces.jsonl", "results.jsonl"
"""The files of a run folder. Those next to the config distinguish it from a YAML file that the user wrote."""
_LOOK = "look at its config.yaml and at what that names, then pass --trust"


def is_run_config(path: str | Path) -> bool:
    file = Path(path).expanduser()
    return (
        file.name == CONFIG
        and file.is_file()
        and any((file.parent / name).exists() for name in (FINGERPRINT, SUMMARY, TRACE_LINES, CHECK_LINES))
    )


def origin_of(path: str | Path, data: dict[str, Any], trust: bool = False) -> Origin:
    """The origin of the names in a YAML file: the user, or a run folder of someone else."""
    if not is_run_config(path) or is_own_config(data) or trusts(trust):
        return USER
    return Origin(f"{Path(path).parent} was not made by your `eval`: its config")


def refuse_foreign(run: Path, data: Mapping[str, Any]) -> None:
    """Raise if the config of another user's run would do more than play tasks. The code that it names is checked when
    it is loaded."""
    if any("${" in text for text in texts_of(data)):
        raise refusal(run, "reads variables of your environment")
    for text in texts_of(data.get("taskset")):
        if "://" in text and not text.startswith((FILE_SCHEME, MODULE_SCHEME)):  # it would receive the user's token
            raise refusal(run, f"would call a server: {text}")
    for node in nodes_of(data.get("taskset")):
        if node.get("trust"):
            raise refusal(run, "would run the code that its rows name")
        for entry in [node["tools"]] if isinstance(node.get("tools"), Mapping) else node.get("tools") or []:
            if not isinstance(entry, str):  # its settings may contain a command
                raise refusal(run, f"has tools of its own: {entry!r:.80}")


def refusal(run: Path, what: str) -> UntrustedCode:
    return UntrustedCode(f"{run} was not made by your `eval`, and {what}", remedy=_LOOK)


def nodes_of(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a taskset's node and the nodes of the sources that it mixes."""
    if isinstance(node, str):
        node = {"id": node}
    if isinstance(node, Mapping):
        yield node
        for source in node.get("sources") or []:
            yield from nodes_of(source)
