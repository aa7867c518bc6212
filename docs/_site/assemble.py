"""Puts the pages of the site together: the folder `docs`, pages from elsewhere in the repository, and reference pages
made from the code.

    python docs/_site/assemble.py && zensical build --strict        # or: zensical serve

A page is written once, for GitHub: its links are relative paths in the repository. Here each is turned into the place
that its target has on the site. `<!-- made: NAME ARGUMENTS -->` in a page is replaced by what the function of that name
in reference.py gives.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

import reference

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/every_trainer/README.md": "examples/every_trainer.md",
    "examples/multiply/README.md": "examples/multiply.md",
    "examples/os_interaction/README.md": "examples/os_interaction.md",
    "examples/train_agent/README.md": "examples/train_agent.md",
    "examples/train_tiny/README.md": "examples/train_tiny.md",
    "examples/turn_credit/README.md": "examples/turn_credit.md",
}
"""Pages that lie outside of the folder `docs`, and what they are on the site."""
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
FILE = re.compile(r"\A(```\w+)\n# file: (\S+)\n")
LINES = re.compile(r"^`(\S+)`:\n\n```jsonl\n", re.M)
MADE = re.compile(r"^<!-- made: (\w+) ?(.*?) -->$", re.M)
CODE_WITH_BORDER = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def assemble(folder: Path) -> None:
    """Writes the whole site's sources into a folder, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.md", "_site", "__pycache__"))
    own = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    for source in (*own, *ELSEWHERE):
        text, linked = _rewritten(source)
        _write(folder / _place_of(source), text.encode())
        for target in linked:
            _write(folder / _place_of(target), (ROOT / target).read_bytes())


def _rewritten(source: str) -> tuple[str, set[str]]:
    """A page as the site has it, and the files it links to that are no pages."""
    linked: set[str] = set()

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if not (ROOT / target).is_file():
            return link[0]
        if not target.endswith(".md") and not target.startswith("docs/"):
            linked.add(target)
        return link[1] + posixpath.relpath(_place_of(target), posixpath.dirname(_place_of(source)) or ".")

    kept: list[str] = []

    def keep(fence: re.Match[str]) -> str:
        kept.append(FILE.sub(r'\1 title="\2"\n', fence[0]))  # the file's name above the block
        return f"\0{len(kept) - 1}\0"

    text = LINES.sub(r'```json title="\1"\n', (ROOT / source).read_text())
    text = FENCE.sub(keep, text)  # what is in fences is shown as it is
    text = LINK.sub(on_site, text)
    text = CODE_WITH_BORDER.sub(
        lambda code: code[0].replace("\\|", "|"), text
    )  # GitHub wants it escaped, this does not
    text = MADE.sub(lambda made: getattr(reference, made[1])(*made[2].split()) + "\n", text)
    return re.sub(r"\0(\d+)\0", lambda number: kept[int(number[1])], text), linked


def _place_of(target: str) -> str:
    """Where a file of the repository is on the site."""
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    assemble(ROOT / "build/docs")
