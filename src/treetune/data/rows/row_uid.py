"""What identifies a row, whatever its format: the uid that it carries, else that of its task.

row_uid(row)
"""

from __future__ import annotations

from treetune.core.task import uid_of
from treetune.data.rows import row_codec
from treetune.data.rows.formats import FORMATS, Row, detect
from treetune.errors import TreetuneError, UsageError
from treetune.system.digest import digest


def row_uid(row: Row, prompt_key: str = "prompt", env_class_key: str = "env_class") -> str:
    """What identifies a row: the uid that it carries or, where it carries none, that of its task."""
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    given = extra.get("uid")
    if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
        return str(given)
    prompt, env_class, spec = row.get(prompt_key), row.get(env_class_key), row.get("reward_spec")
    plain = isinstance(env_class, str) and env_class != row_codec.SCORED and row_codec.KEY not in extra
    if plain and isinstance(prompt, list) and isinstance(spec, dict):
        # Without making the task.
        return uid_of(prompt, spec, env_class)
    named = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    named |= {name: value for name, value in (("prompt", prompt), ("env_class", env_class)) if value is not None}
    try:
        try:
            format = detect(named)
        except UsageError:
            format = FORMATS["skyrl"]
        return format.task_of_pruned(named).uid
    except (TreetuneError, TypeError):  # no task: reading the prompt reports what is wrong
        return digest(repr(row))
