"""What verbs say about the TARGET that they take, and the options that go with it."""

from __future__ import annotations

TARGET = (
    "An id, config.yaml, file.py:Name, module:Name, rows (a file, folder or hub name), or a server (tcp://, http://)."
)
TASKS_TARGET = "An id, config.yaml, file.py:Name, module:Name, or rows: a file, a folder or a hub name."
"""Of verbs that need the tasks themselves, which a server keeps."""

TRUST = "Run code that rows name, though no build of yours has kept it."


def trusted(trust: bool) -> dict[str, str]:
    """What `--trust` overrides."""
    return {"taskset.trust": "true"} if trust else {}
