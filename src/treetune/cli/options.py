"""Declares what several verbs share: options, dotted overrides (`--taskset.level 3`), and shell completion.

    treetune --install-completion

The shell starts `treetune` for each TAB: only the typed verb is loaded, and no code of a target.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import escape, iglob
from pathlib import Path
from typing import Annotated, Any

import typer

from treetune.config.aliases import OTHER_NAMES, suggest_key
from treetune.errors import UsageError, did_you_mean

COMPLETION_VARIABLE = "_TREETUNE_COMPLETE"
"""The variable that the shell's completion script sets."""
_FILES = (".yaml", ".yml", ".py", ".jsonl", ".parquet")


def typed_words() -> list[str]:
    """The words after `treetune` on the command line that the shell completes; none without completion."""
    if COMPLETION_VARIABLE not in os.environ:
        return []
    return _words(os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", ""))[1:]


def hide_overrides() -> None:
    """Removes complete dotted overrides from the words that typer sees, because it would reject them as unknown."""
    for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS") if COMPLETION_VARIABLE in os.environ else ():
        if (text := os.environ.get(name)) is None:
            continue
        words = [*_words(text), ""]
        at = len(words) - (1 if text.endswith(" ") else 2)  # the word to complete
        if name == "COMP_WORDS":
            at = min(at, int(os.environ.get("COMP_CWORD", at)))
        kept: list[str] = []
        for word in words[:at]:
            before = kept[-1] if kept else ""
            if _is_dotted(before) and "=" not in before:
                kept.pop()
            elif not (_is_dotted(word) and "=" in word):
                kept.append(word)
        os.environ[name] = " ".join([*map(shlex.quote, kept), words[at]])
        os.environ["COMP_CWORD"] = str(len(kept))


def _words(text: str) -> list[str]:
    with suppress(ValueError):
        return shlex.split(text)
    return text.split()  # a quote is still open


def _is_dotted(word: str) -> bool:
    return word.startswith("--") and "." in word.partition("=")[0]


def complete_target(incomplete: str) -> Iterator[str]:
    """Ids of tasksets, ready sets, and files that can be a TARGET."""
    from treetune.config.plugins import ready_names, tasksets

    yield from sorted(name for name in {*tasksets.names(), *ready_names()} if name.startswith(incomplete))
    for found in sorted(iglob(f"{escape(incomplete)}*")):
        if Path(found).is_dir() or found.endswith(_FILES):
            yield f"{found}/" if Path(found).is_dir() else found


def complete_model(incomplete: str) -> Iterator[str]:
    from treetune.models import SPELLINGS

    yield from (name for name in SPELLINGS if name.startswith(incomplete) and name != "NAME")


def option(help: str, *names: str, **settings: Any) -> Any:
    """An option of a verb, with its help and, if they differ from the parameter's name, its names."""
    return typer.Option(*names, help=help, **settings)


TARGET = (
    "An id, a ready set (gsm8k), config.yaml, file.py:Name, module:Name, rows (a file, folder or hub name), or a "
    "server (tcp://, http://)."
)


def target(help: str = TARGET) -> Any:
    """The argument that names a TARGET."""
    return typer.Argument(help=help, autocompletion=complete_target)


Target = Annotated[str, target()]
TasksTarget = Annotated[
    str,
    target("An id, a ready set (gsm8k), config.yaml, file.py:Name, module:Name, or rows (a file, folder or hub name)."),
]
"""For verbs that need the tasks themselves, which a server does not provide."""
NumTasks = Annotated[
    int | None, option("How many tasks. Default: all; an infinite taskset requires it.", "-n", "--num-tasks", min=1)
]
MaxConcurrent = Annotated[
    int | None, option("The maximum number of rollouts or checks that run at once (64).", "-c", "--max-concurrent")
]
MaxJudgeTokens = Annotated[
    int | None, option("Start no more rollouts once judges have used this many tokens.", "--max-judge-tokens", min=1)
]
Split = Annotated[
    str | None,
    option("With train_tasks and val_tasks: which list. Default: the only one, or val (`serve`, `audit`: train)."),
]
Output = Annotated[Path | None, option("The folder for the results.", "-o", "--output")]
Resume = Annotated[bool, option("Resume the results in -o: play only what is missing or failed.")]
Agent = Annotated[
    str | None,
    option(
        "What plays each task and calls the model itself: a known agent (codex, claude-code, ...), ./my_agent.py, "
        "FILE.py:FUNCTION, a YAML file, or 'COMMAND ARGUMENTS'. It runs on the machine of its task, or here."
    ),
]
Trust = Annotated[bool, option("Run code that is named in rows or in another user's run folder.", "--trust")]
Log = Annotated[
    list[str] | None,
    option("Also log to wandb, mlflow or tensorboard (extras of these names). Repeatable.", "--log"),
]
Format = Annotated[str, option("verl, skyrl or trl.")]
Tokenizer = Annotated[
    str | None, option("A tokenizer, by folder or name, that counts the tokens of prompts (extra `local`).")
]
MaxPromptLength = Annotated[
    int | None, option("The maximum number of tokens in a prompt; requires --tokenizer.", min=1)
]
PassThreshold = Annotated[float | None, option("The reward from which a rollout counts as solved (1.0).")]
CacheDir = Annotated[
    Path | None, option("The cache folder. Default: TREETUNE_TASK_CACHE_DIR, or ~/.cache/treetune/tasks.")
]
Token = Annotated[str | None, option("The server's token.", envvar="TREETUNE_TOKEN")]
OpenAccess = Annotated[bool, option("Allow an address that other machines can reach without a token.", "--open")]
Json = Annotated[bool, option("Print one JSON object on standard output.", "--json")]
JsonWhenReady = Annotated[bool, option("Print one JSON object on standard output when ready.", "--json")]

TASKS = ("taskset", "train_tasks", "val_tasks")
"""The groups of a TARGET's own keys: `--taskset.level 3`, `--val_tasks[0].max_rows 10`."""
_PLAYED = (*TASKS, "sampling", "limits", "endpoint")
OVERRIDABLE = {
    **dict.fromkeys(("build", "export", "push", "show", "train"), TASKS),
    **dict.fromkeys(("audit", "profile"), _PLAYED),
    **dict.fromkeys(("eval", "serve"), (*_PLAYED, "agent")),
    "gateway": ("limits", "sampling", "template"),
    "validate": (*TASKS, "limits"),
}
"""The verbs that take dotted overrides, each with the groups of its keys."""


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without dotted overrides, and the overrides as `{"taskset.level": "3"}`. They may appear anywhere,
    but typer does not know them and would take one before the target for the target."""
    plain: list[str] = []
    overrides: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if argument == "--":
            return [*plain, argument, *waiting], overrides
        if not argument.startswith("--") or "." not in key:
            plain.append(argument)
        elif not equals and (not waiting or waiting[0].startswith("--")):
            remedy = f"write {argument} VALUE, or {argument}=VALUE if the value begins with dashes"
            raise UsageError(f"{argument} needs a value", remedy=remedy)
        else:
            overrides[key] = value if equals else waiting.pop(0)
    return plain, overrides


def read_overrides(
    context: typer.Context, groups: Sequence[str] | None = None, *, trust: bool = False
) -> dict[str, str]:
    """The dotted overrides. Each key must begin with one of the `groups`, by default those of the verb. `trust` is the
    verb's `--trust`."""
    overrides: dict[str, str] = context.obj
    groups = OVERRIDABLE[str(context.info_name)] if groups is None else groups
    for key in overrides:
        if re.split(r"[.\[]", key)[0] not in groups:
            rest = key.partition(".")[2]
            hint = suggest_key(
                rest.rpartition(".")[2], [each for each in OTHER_NAMES if each.partition(".")[0] in groups]
            )
            hint = hint or did_you_mean(key, [f"{group}.{rest}" for group in groups])
            beginnings = ", ".join(f"--{group}." for group in groups)
            remedy = f"dotted overrides begin with {beginnings}" if beginnings else "it takes no dotted overrides"
            raise UsageError(f"unknown argument --{key}{hint}", remedy=remedy)
    return overrides | ({"taskset.trust": "true"} if trust else {})


def with_agent(data: dict[str, Any], agent: str | None) -> dict[str, Any]:
    """The config with the agent of `--agent`, next to settings such as `--agent.limits.calls`."""
    if agent is None:
        return data
    settings = data.get("agent")
    return {**data, "agent": {**settings, "name": agent} if isinstance(settings, dict) else agent}
