"""What verbs say about the TARGET that they take."""

from __future__ import annotations

TARGET = "An id, config.yaml, file.py:Name, module:Name, or a server (tcp://, http://)."
TASKS_TARGET = "An id, config.yaml, file.py:Name or module:Name."
"""Of verbs that need the tasks themselves, which a server keeps."""
