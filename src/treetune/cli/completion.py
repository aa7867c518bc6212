"""What the shell offers when TAB is pressed: verbs and options, which typer knows, and names of tasksets and models.

    treetune --install-completion

The shell starts `treetune` anew for each TAB: only the verb that stands there is loaded, and no code of a target.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from glob import escape, iglob
from pathlib import Path

ASKED = "_TREETUNE_COMPLETE"
"""The variable by which the shell's script asks."""
_FILES = (".yaml", ".yml", ".py", ".jsonl", ".parquet")


def typed_words() -> list[str]:
    """What stands on the command line that is completed, after `treetune`; nothing where none is."""
    if ASKED not in os.environ:
        return []
    return _words(os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", ""))[1:]


def hide_overrides() -> None:
    """Takes finished dotted overrides out of what typer is shown: it does not know them, and would give up."""
    for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS") if ASKED in os.environ else ():
        if (text := os.environ.get(name)) is None:
            continue
        words = [*_words(text), ""]
        at = len(words) - (1 if text.endswith(" ") else 2)  # which TAB is pressed in
        if name == "COMP_WORDS":
            at = min(at, int(os.environ.get("COMP_CWORD", at)))
        kept: list[str] = []
        for word in words[:at]:
            before = kept[-1] if kept else ""
            if _is_dotted(before) and "=" not in before:
                kept.pop()
            elif not (_is_dotted(word) and "=" in word):
                kept.append(word)
        os.environ[name] = " ".join([*map(shlex.quote, kept), words[at]])
        os.environ["COMP_CWORD"] = str(len(kept))


def _words(text: str) -> list[str]:
    with suppress(ValueError):
        return shlex.split(text)
    return text.split()  # a quote that is still open


def _is_dotted(word: str) -> bool:
    return word.startswith("--") and "." in word.partition("=")[0]


def complete_target(incomplete: str) -> Iterator[str]:
    """Ids of tasksets, ready sets, and files that a TARGET may be."""
    from treetune.config.builtin import ready_names
    from treetune.config.plugins import tasksets

    yield from sorted(name for name in {*tasksets.names(), *ready_names()} if name.startswith(incomplete))
    for found in sorted(iglob(f"{escape(incomplete)}*")):
        if Path(found).is_dir() or found.endswith(_FILES):
            yield f"{found}/" if Path(found).is_dir() else found


def complete_model(incomplete: str) -> Iterator[str]:
    from treetune.models import SPELLINGS

    yield from (name for name in SPELLINGS if name.startswith(incomplete) and name != "NAME")
