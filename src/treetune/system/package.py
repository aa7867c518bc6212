"""The package itself: where it is, and which version is installed."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent


def read_version() -> str:
    """It comes from the tag of a release."""
    from importlib.metadata import PackageNotFoundError, version  # 40 ms that few need

    try:
        return version("treetune")
    except PackageNotFoundError:  # a source folder on the path
        return "0+source"
