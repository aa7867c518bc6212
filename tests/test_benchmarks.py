"""The benchmarks can still be run: each names what it measures by its place in the package."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.__main__ import QUICK


@pytest.mark.parametrize("name", QUICK)
def test_its_imports_are_there(name):
    assert importlib.import_module(f"benchmarks.{name}").__doc__
