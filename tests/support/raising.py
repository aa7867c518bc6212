"""Errors as tests expect them: the code, and the facts in the message; never its sentences.

    with raises_code("unknown-key", "taskset.levle", "level"):
        ...

Their wording is in `messages.txt`, an example for each code (`tests/test_errors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from treetune.errors import TreetuneError


@contextmanager
def raises_code(code: str, *facts: object) -> Iterator[pytest.ExceptionInfo[TreetuneError]]:
    """Expects a Treetune error with this code, whose text contains each fact: a name, a number, a file and its line, a
    flag of the remedy."""
    with pytest.raises(TreetuneError) as caught:
        yield caught
    text = str(caught.value)
    assert caught.value.code == code, text
    assert [fact for fact in map(str, facts) if fact not in text] == [], text
