"""What identifies a row: the uid that it carries or, where it carries none, that of its task."""

from __future__ import annotations

from treetune.canonical import digest
from treetune.errors import TreetuneError, UsageError
from treetune.rows.batch import Row
from treetune.rows.format import FORMATS, detect
from treetune.rows.round_trip import KEY, SCORED
from treetune.uid import uid_of as task_uid


def uid_of(row: Row, prompt_key: str = "prompt", env_class_key: str = "env_class") -> str:
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    given = extra.get("uid")
    if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
        return str(given)
    prompt, env_class, spec = row.get(prompt_key), row.get(env_class_key), row.get("reward_spec")
    plain = isinstance(env_class, str) and env_class != SCORED and KEY not in extra
    if plain and isinstance(prompt, list) and isinstance(spec, dict):
        return task_uid(prompt, env_class, spec)  # without making the task
    named = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    named |= {name: value for name, value in (("prompt", prompt), ("env_class", env_class)) if value is not None}
    try:
        try:
            format = detect(named)
        except UsageError:
            format = FORMATS["skyrl"]
        return format.task_of_pruned(named).uid
    except (TreetuneError, TypeError):  # no task: whoever reads the prompt tells what is wrong
        return digest(repr(row))
