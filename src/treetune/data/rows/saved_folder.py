"""Folders that `Dataset.save_to_disk` wrote, opened as `load_dataset` opens a dataset.

    if is_saved(params.path):
        dataset = load_saved(params.path, params.kwargs)

The library refuses such a folder in `load_dataset`, and `load_from_disk` knows no `split`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.data.rows.split_slices import parse_split
from treetune.errors import UsageError


def is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def load_saved(folder: Path, kwargs: Mapping[str, Any]) -> Any:
    """A dataset, or several by their splits. `split` means the same as in `load_dataset`, slices included."""
    import datasets

    split = kwargs.get("split")
    if further := [name for name in kwargs if name not in ("split", "cache_dir")]:
        raise UsageError(
            f"loading_params.kwargs has {further[0]}, and {folder} was written by save_to_disk",
            remedy="such a folder has splits and nothing else to choose: leave the key out",
        )
    saved = datasets.load_from_disk(str(folder))
    if split is None:
        return saved
    parts = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    pieces = parse_split(str(split), parts)
    chosen = [parts[piece.split].select(piece.range_of(len(parts[piece.split]))) for piece in pieces]
    return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)
