"""Explains flags and verbs of other tools: what each is called in Treetune, with the given value.

    treetune eval arithmetic --temperature 0.7
    error: no such option: --temperature; did you mean --sampling.temperature 0.7?

It is only loaded for errors.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from treetune.cli.options import OVERRIDABLE
from treetune.config.aliases import keys_meant
from treetune.errors import TreetuneError, did_you_mean

VERBS = {
    "eval": "evaluate run test bench benchmark play vf-eval",
    "list": "ls tasks",
    "init": "new create scaffold",
    "validate": "check lint",
    "serve": "start server",
    "show": "inspect look cat",
    "build": "prepare download",
    "compare": "diff",
    "top": "status watch",
    "rescore": "score",
    "train": "fit finetune",
    "view": "ui dashboard browse",
    "push": "upload publish",
}
"""Other tools' names for our verbs."""
OPTIONS = {
    "output": "output_path output_dir out out_dir log_dir save_dir save_to save results_dir run_dir",
    "traces": "log_dir save_dir trace_dir output output_dir",
    "to": "output output_dir out",
    "cache_dir": "output output_dir output_path out",
}
"""Options that are not config keys, with other tools' names for them."""
SHORT = {"-T": "task_args", "-M": "model_args", "-a": "env_args", "-S": "sampling_args", "-b": "base_url"}
"""Short flags of Inspect and verifiers."""
COLLECTED = {"sampling_args": "sampling", "gen_kwargs": "sampling", "env_args": "taskset", "task_args": "taskset"}
"""Flags that take several keys in one value, with our group of these keys."""
ABOUT = {
    "num_tasks": "how many tasks",
    "num_rollouts": "how often each is tried",
    "max_concurrent": "how many at once",
    "sampling.seed": "of the model",
    "taskset.shuffle.seed": "of the order of tasks",
    "taskset.seed": "of the tasks themselves",
}
"""Chooses the key if a word may mean several."""
_TARGET = ("task", "tasks", "taskset", "env", "env_id", "environment", "dataset", "config", "target", "file")


def suggest_verb(name: str, known: Iterable[str]) -> str:
    """The message for an unknown verb, with our name for another tool's verb, or the closest match."""
    meant = [verb for verb, others in VERBS.items() if name in others.split()]
    return f"no such command {name!r}" + (f"; did you mean {meant[0]!r}?" if meant else did_you_mean(name, known))


def explain_flags(verb: str, arguments: Sequence[str], command: Any) -> str | None:
    """Explains all options that the verb does not have; None if it has them all. `command` is typer's command of the
    verb."""
    known = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    unknown, alone = _split(arguments[1:], known)
    unknown = [(name, value) for name, value in unknown if not _is_override(verb, name)]
    places = [each.name for each in command.params if each.param_type_name == "argument"]
    target = next((value for name, value in zip(places, alone, strict=False) if name in ("target", "targets")), None)
    faults = [_Flag(verb, known, target, name, value).explain() for name, value in unknown]
    if len(faults) > 1:
        return f"{len(faults)} options that `{verb}` does not have:\n" + "\n".join(f"  {fault}" for fault in faults)
    return f"no such option: {faults[0]}" if faults else None


def _is_override(verb: str, name: str) -> bool:
    """Whether it is dotted and in a group of the verb; `read_overrides` checks these."""
    group, dot, _ = name.removeprefix("--").partition(".")
    return bool(dot) and group in OVERRIDABLE.get(verb, ())


def _split(arguments: Sequence[str], known: Mapping[str, Any]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """The unknown options, each with its value, and the positional arguments."""
    unknown: list[tuple[str, str | None]] = []
    alone: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--":
            return unknown, alone + waiting
        if not argument.startswith("-"):
            alone.append(argument)
        elif name in known:
            if not getattr(known[name], "is_flag", False) and not equals:
                waiting[:1] = []
        elif name.startswith("--") or name[:2] not in known:
            has_value = bool(waiting) and not equals and (not waiting[0].startswith("-") or waiting[0][1:2].isdecimal())
            unknown.append((name, value if equals else waiting.pop(0) if has_value else None))
    return unknown, alone


class _Flag:
    """An option that the verb does not have."""

    def __init__(self, verb: str, known: Mapping[str, Any], target: str | None, name: str, value: str | None) -> None:
        self.verb, self.target, self.name, self.value = verb, target, name, value
        self.word = SHORT.get(name, name.lstrip("-").replace("-", "_"))
        self.given = "VALUE" if value is None else shlex.quote(value)
        self.groups = OVERRIDABLE.get(verb, ())
        self.options = {option.name: option.opts[0] for option in known.values() if option.opts[0].startswith("-")}
        self.long = [name for name in known if name.startswith("--")]
        self.takes_target = "target" in known or "targets" in known

    def explain(self) -> str:
        if self.word == "tasks" and self.given.isdecimal() and "num_tasks" in self.options:
            return f"{self.name}; did you mean {self._spell('num_tasks')}?"
        if self.word in _TARGET and self.takes_target:
            return f"{self.name}; TARGET needs no flag: treetune {self.verb} {self.given}"
        if self.word in ("api_key", "openai_api_key") and "endpoint" in self.groups:  # do not show the key itself
            return f"{self.name}; --endpoint.api_key_env names the environment variable that holds the key"
        if meant := self._special() or self._by_meaning() or self._by_spelling():
            return f"{self.name}; did you mean {' or '.join(meant)}?"
        if self.verb == "train":
            key = f"{self.word}={self.given}"
            return f"{self.name}; write keys of the trainer after the TARGET, without dashes: {key}"
        if self.verb != "eval" and (keys := [key for key in keys_meant(self.word) if "." in key]):
            return f"{self.name}; `treetune eval` has it: {self._spell(keys[0])}"
        return self.name

    def _special(self) -> list[str]:
        """Flags whose value is not a valid value of our key."""
        word, group = self.word, COLLECTED.get(self.word, "")
        if group in self.groups:
            pairs = _read_pairs(self.value) or {"KEY": "VALUE"}
            return [" ".join(f"--{group}.{key} {shlex.quote(value)}" for key, value in pairs.items())]
        if word == "model_args" and "-m" in self.options.values():
            return [f"-m local:{shlex.quote(_read_pairs(self.value).get('pretrained', 'PATH'))}"]
        if word in ("host", "bind", "listen") and "http" in self.options:
            return [f"--http {self.given}:5000"]
        return []

    def _by_meaning(self) -> list[str]:
        meant = [key for key in keys_meant(self.word) if key in self.options or self._is_dotted(key)]
        meant += [name for name, others in OPTIONS.items() if self.word in others.split() and name in self.options]
        own = {"taskset." + key.rpartition(".")[2] for key in (self.word, *keys_meant(self.word))}
        meant += [key for key in self._keys_of_target() if key in own]
        about = {key: f" ({ABOUT[key]})" if len(meant) > 1 and key in ABOUT else "" for key in meant}
        return [self._spell(key) + about[key] for key in dict.fromkeys(meant)]

    def _by_spelling(self) -> list[str]:
        named = {name.removeprefix("--").replace("-", "_"): name for name in self.long}
        named |= {key.rpartition(".")[2]: self._spell(key) for key in self._keys_of_target()}
        return [named[name] for name in did_you_mean(self.word, named).split("'")[1::2]]

    def _is_dotted(self, key: str) -> bool:
        return "." in key and key.partition(".")[0] in self.groups

    def _spell(self, key: str) -> str:
        """A key as it is typed, with the value."""
        if key in self.options:
            return f"{self.options[key]} {self.given}"
        given = self.given
        if key == "endpoint.base_url" and self.word in ("host", "port"):
            given = f"http://{given}:8000/v1" if self.word == "host" else f"http://127.0.0.1:{given}/v1"
        return f"--{key} {given}"

    def _keys_of_target(self) -> list[str]:
        """The keys of the TARGET's taskset, such as `taskset.level`; none if it cannot be read."""
        if self.target is None or "taskset" not in self.groups:
            return []
        from treetune.evaluation import keys_of
        from treetune.tasksets.target import read_target

        with suppress(TreetuneError, OSError):
            return keys_of(read_target(self.target)["taskset"])
        return []


def _read_pairs(text: str | None) -> dict[str, str]:
    """Reads several keys in one value: `{"temperature": 0.7}`, `temperature=0.7,top_p=1`."""
    with suppress(ValueError, AttributeError, TypeError):
        return {str(key): str(value) for key, value in json.loads(text or "").items()}
    pairs = [part.partition("=") for part in (text or "").replace(",", " ").split()]
    return {key: value for key, equals, value in pairs if equals}
