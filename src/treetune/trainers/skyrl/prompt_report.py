"""What a PromptDataset left out, and why: printed once when it is made, and there as `dataset.report`."""

from __future__ import annotations

import msgspec

FIRST = 10
"""Rows that are named."""


class Dropped(msgspec.Struct, frozen=True):
    row: int
    """Counted through all files, from 0."""
    tokens: int
    place: str
    """The file and the row in it."""


class FileCount(msgspec.Struct):
    source: str
    rows: int
    dropped: int = 0
    without_env_class: int = 0


class PromptReport(msgspec.Struct, kw_only=True):
    max_prompt_length: int
    files: list[FileCount]
    longest: int = 0
    """The tokens of the longest prompt that was dropped."""
    first: list[Dropped] = []
    """The first rows that were dropped."""
    repeated: int = 0
    """Rows whose uid an earlier one has; a number is put behind it."""
    shared: int = 0
    """The same with the earlier ones: equal rows, or different ones with one uid of the user's own."""
    cached: bool = False
    """Whether all this was known from an earlier start."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def dropped(self) -> int:
        return sum(file.dropped for file in self.files)

    @property
    def kept(self) -> int:
        return self.rows - self.dropped

    @property
    def without_env_class(self) -> int:
        return sum(file.without_env_class for file in self.files)

    def __str__(self) -> str:
        known = " (known from an earlier start)" if self.cached else ""
        lines = [f"{self.kept:,} of {self.rows:,} rows have at most {self.max_prompt_length:,} tokens{known}"]
        if self.dropped:
            lines.append(f"  dropped: {self.dropped:,}, the longest of {self.longest:,} tokens")
            lines += [f"    {file.source}: {file.dropped:,}" for file in self.files if file.dropped]
            lines.append("  first: " + "; ".join(f"{row.place} ({row.tokens:,})" for row in self.first))
        if self.repeated:
            lines.append(f"  {self.shared:,} rows share a uid with another")
        if self.without_env_class:
            lines.append(f"  without an environment, so the trainer's default runs them: {self.without_env_class:,}")
        return "\n".join(lines)
