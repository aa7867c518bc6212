"""Splits: which files of a folder form a split, which rows a `split` of `load_dataset` means, and saved folders.

    split_files(folder, files)      # {"train": [folder/train.parquet], "test": [folder/test.parquet]}
    pieces = parse_split("train[:10%]+test", ["train", "test"])
    [(piece.split, piece.range_of(1000)) for piece in pieces]    # [("train", range(0, 100)), ("test", range(0, 1000))]

Files belong to the splits that `datasets.load_dataset(folder)` finds: those in a card (README.md with `configs`), else
by the names of shards, folders or files, in this order. Without any of these, all files are `train`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treetune.errors import ConfigError, UsageError

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words in names that indicate each split."""

NO_ROWS = frozenset(("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"))
"""Files about a dataset, which `load_dataset` does not read as rows."""

_SHARD = re.compile(r"data/([^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)


def split_files(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split. If some files belong to a split, those that belong to none are left out."""
    if (declared := _read_card(folder)) is not None:
        matches = {split: _match(folder, patterns) for split, patterns in declared.items()}
        found = {split: [file for file in files if file in matched] for split, matched in matches.items()}
        if any(found.values()):
            return {split: some for split, some in found.items() if some}
    for split_of in (_split_of_shard, _by_keyword(_folder_names), _by_keyword(lambda name: [name.rpartition("/")[2]])):
        splits: dict[str, list[Path]] = {}
        for file in files:
            for split in split_of(file.relative_to(folder).as_posix()):
                splits.setdefault(split, []).append(file)
        if splits:
            return splits
    return {"train": list(files)} if files else {}


def split_called(name: str) -> str:
    """Return the split that a name means: `val` is `validation`."""
    return next((split for split, words in KEYWORDS.items() if name in words), name)


def _split_of_shard(name: str) -> list[str]:
    return [match[1]] if (match := _SHARD.fullmatch(name)) else []


def _folder_names(name: str) -> list[str]:
    return name.split("/")[:-1]


def _by_keyword(parts_of: Callable[[str], Iterable[str]]) -> Callable[[str], list[str]]:
    """Match splits whose keyword is a whole word in one of the parts of a name: `gsm8k-train.parquet`, not
    `training1st`."""

    def find(name: str) -> list[str]:
        words = {word for part in parts_of(name) for word in re.split(r"[-._ 0-9]", part)}
        return [split for split, keywords in KEYWORDS.items() if words.intersection(keywords)]

    return find


def _read_card(folder: Path) -> dict[str, list[str]] | None:
    """Return the patterns of each split that a folder's README.md declares, or None if it declares none."""
    import yaml

    try:
        matter = _FRONT_MATTER.match((folder / "README.md").read_text(encoding="utf-8"))
        card: Any = yaml.safe_load(matter[1]) if matter else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    configs = [each for each in _list_of(card, "configs") if isinstance(each, dict) and each.get("data_files")]
    if not configs:
        return None
    usual = [each for each in configs if each.get("default") or each.get("config_name") == "default"]
    if len(configs) > 1 and not usual:
        names = ", ".join(str(each.get("config_name")) for each in configs)
        raise UsageError(
            f"{folder / 'README.md'} declares several configs: {names}", remedy="name the files themselves"
        )
    return patterns_by_split((usual or configs)[0]["data_files"])


def _match(folder: Path, patterns: Iterable[str]) -> set[Path]:
    # For a pattern that ends in `**`, glob returns only folders.
    plain = [pattern.removeprefix("./") for pattern in patterns]
    spelled = [f"{pattern}/*" if pattern.endswith("**") else pattern for pattern in plain]
    return {file for pattern in spelled if not pattern.startswith("/") for file in folder.glob(pattern)}


def patterns_by_split(data_files: Any) -> dict[str, list[str]]:
    """Return the names and globs of each split in `data_files`, of a card or of `load_dataset`; the default split is
    train."""
    if isinstance(data_files, Mapping) and not _is_entry(data_files):
        return {str(split): list(iter_patterns(value)) for split, value in data_files.items()}
    by_split: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split = str(entry["split"]) if _is_entry(entry) else "train"
        by_split.setdefault(split, []).extend(iter_patterns(entry))
    return by_split


def iter_patterns(data_files: Any) -> Iterator[str]:
    """Yield the names in `data_files`: a single name, a list, splits, or a list of `{split:, path:}`."""
    if isinstance(data_files, str | os.PathLike):
        yield str(data_files)
    elif isinstance(data_files, Mapping):
        yield from iter_patterns(data_files["path"] if _is_entry(data_files) else list(data_files.values()))
    elif isinstance(data_files, Sequence):
        for item in data_files:
            yield from iter_patterns(item)
    elif data_files is not None:
        shown = f"expected the name of a file, a list or a mapping of them, got {data_files!r}"
        raise ConfigError([("loading_params.kwargs.data_files", shown)])


def _is_entry(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"split", "path"}


def _list_of(card: Any, key: str) -> list[Any]:
    value = card.get(key) if isinstance(card, dict) else None
    return value if isinstance(value, list) else []


# The rows that `split` selects

_PIECE = re.compile(
    r"(?P<split>\w+(?:\.\w+)*)(?:\[(?P<start>-?[\d_]+%?)?:(?P<stop>-?[\d_]+%?)?\])?(?:\((?P<rounding>[^)]*)\))?"
)


class Piece(NamedTuple):
    split: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False
    whole: bool = False
    """Whether one percent is a whole number of rows, as in `(pct1_dropremainder)`."""

    def range_of(self, rows: int) -> range:
        """Return the rows of a split with this many rows."""
        start = self._place(0 if self.start is None else self.start, rows)
        stop = rows if self.stop is None else self._place(self.stop, rows)
        return range(start, max(start, stop))

    def _place(self, boundary: int, rows: int) -> int:
        if self.percent and self.whole:
            if rows < 100:
                problem = f"split: {self.split!r} has {rows} rows, fewer than 100, and (pct1_dropremainder) takes none"
                raise UsageError(problem, remedy="leave (pct1_dropremainder) out")
            boundary *= rows // 100
        elif self.percent:
            boundary = round(boundary * rows / 100.0)
        return min(max(rows + boundary, 0) if boundary < 0 else boundary, rows)


def parse_split(text: str, splits: Collection[str]) -> list[Piece]:
    """Parse parts whose rows follow each other. `splits` are the existing ones; `all` means each of them."""
    if text == "all":
        return [Piece(split) for split in splits]
    pieces: list[Piece] = []
    for part in re.split(r"\s*\+\s*", text.strip()):
        match = _PIECE.fullmatch(part)
        if match is None or match["rounding"] not in (None, "closest", "pct1_dropremainder"):
            remedy = "write train, train[:100], train[:10%] or train[:50%]+test"
            raise UsageError(f"loading_params.kwargs.split: {text!r} is not a split", remedy=remedy)
        bounds = [match["start"], match["stop"]]
        start, stop = (None if bound is None else int(bound.rstrip("%")) for bound in bounds)
        percent = any(bound is not None and bound.endswith("%") for bound in bounds)
        if percent and any(bound is not None and abs(bound) > 100 for bound in (start, stop)):
            raise UsageError(f"loading_params.kwargs.split: {text!r} has a share above 100%")
        if match["split"] not in splits:
            problem = f"Unknown split {match['split']!r}: there is {', '.join(splits)}"
            raise UsageError(problem, remedy="check loading_params.kwargs.split; files without one are train")
        pieces.append(Piece(match["split"], start, stop, percent, match["rounding"] == "pct1_dropremainder"))
    return pieces


# Folders of `Dataset.save_to_disk`


def is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def load_saved(folder: Path, kwargs: Mapping[str, Any]) -> Any:
    """Load a dataset, or several by split. `split` works as in `load_dataset`, including slices."""
    import datasets

    split = kwargs.get("split")
    if further := [name for name in kwargs if name not in ("split", "cache_dir")]:
        raise UsageError(
            f"loading_params.kwargs has {further[0]}, and {folder} was written by save_to_disk",
            remedy="a saved folder only has splits to choose from: leave the key out",
        )
    saved = datasets.load_from_disk(str(folder))
    if split is None:
        return saved
    parts = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    pieces = parse_split(str(split), parts)
    chosen = [parts[piece.split].select(piece.range_of(len(parts[piece.split]))) for piece in pieces]
    return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)
