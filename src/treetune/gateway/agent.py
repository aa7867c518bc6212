"""Describes an agent: a program that was not written for Treetune, or an async function in Python.

    agent:
      command: ["python", "my_agent.py"]
      sandbox: machine                  # or `none`
      answer: stdout                    # or `file:answer.txt`, `machine`

`read_agent("codex")` is a known agent, a row of `agents.toml`; `read_agent("./my_agent.py")` a program of the user.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from treetune.config.code_reference import CodeKind, find_reference
from treetune.config.interpolation import deep_merge
from treetune.config.plugins import load_object
from treetune.config.structs import convert, load_yaml
from treetune.config.trust import USER
from treetune.core.agent import AgentNeeds
from treetune.errors import UsageError, did_you_mean
from treetune.gateway.session import SessionLimits

TABLE = Path(__file__).with_name("agents.toml")
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib")
"""The host's folders that every sandbox shows."""
Play = Callable[[Any, Any], Awaitable[str]]
"""An agent in Python: `async def agent(task, client) -> str`."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    """What the other settings override: a known agent, a program, `FILE.py:FUNCTION`; or only a name for traces."""
    command: list[str] = []
    """The program and its arguments. `TREETUNE_TASK` is the path of a file with the problem; `OPENAI_BASE_URL`,
    `ANTHROPIC_BASE_URL` and others lead to the model."""
    sandbox: Literal["machine", "none"] | None = None
    """Where it runs. `machine`: on the machine of the task, or in a sandbox of its own; it reaches only the model.
    `none`: on this machine, as you. Absent: on the machine of the task if it has one, otherwise here."""
    answer: Annotated[str, msgspec.Meta(pattern="^(stdout|machine|file:.+)$")] = "stdout"
    """Where its answer is: what it prints, a file (`file:answer.txt`), or nothing but the state of the machine."""
    env: dict[str, str] = {}
    """Further environment variables."""
    folders: list[str] = []
    """Further files and folders of this host that it can read in the sandbox."""
    tokenizer: str | None = None
    """The folder or the name of the model at the endpoint, if that is vLLM or SGLang. It is then asked with tokens, so
    that they are recorded."""
    limits: SessionLimits = SessionLimits()
    """The limits of one rollout. An agent that reaches one is ended, and what it left is scored."""
    memory_mb: int = 4096
    """The least memory, number of processes and disk space of its machine."""
    processes: int = 256
    disk_mb: int = 256
    starts: list[str] = []
    """Programs that the command starts, if it is a script of a shell."""
    install: str = ""
    """How to install it, for the error if a program is missing."""

    def find_programs(self) -> list[Path]:
        """Return its programs, and the interpreters that they need. Raises UsageError if one is missing."""
        if not self.command:
            raise UsageError("the agent has no command", remedy="agent: {command: [python, my_agent.py]}")
        found = []
        for name in (self.command[0], *self.starts):
            if (path := shutil.which(name)) is None:
                remedy = self.install or "name a Python file, or a program on the PATH"
                raise UsageError(f"there is no program {name!r}", remedy=remedy)
            found += [Path(path), *_interpreters(Path(path))]
        return found

    def needs(self) -> AgentNeeds:
        """What it needs of a machine: its own files, at the paths that they have here."""
        parts = [part for program in self.find_programs() for part in _parts_of(program)]
        parts += [Path(word) for word in self.command[1:] if word.startswith("/") and os.path.exists(word)]
        parts += [Path(folder).expanduser().absolute() for folder in self.folders]
        paths = sorted({str(part) for part in parts if not str(part).startswith(_SYSTEM)})
        outer = [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]
        sizes = {"memory_mb": self.memory_mb, "processes": self.processes, "disk_mb": self.disk_mb}
        return AgentNeeds(shown=tuple((path, path) for path in outer), **sizes)

    def search_path(self, path: str) -> str:
        """A PATH with the folders of its programs in front."""
        return os.pathsep.join(dict.fromkeys([*(str(each.parent) for each in self.find_programs()), *path.split(":")]))


class PythonAgent(NamedTuple):
    name: str
    play: Play
    limits: SessionLimits = SessionLimits()
    tokenizer: str | None = None


def read_agent(agent: str | Mapping[str, Any]) -> AgentConfig | PythonAgent:
    """Read an agent: the name of a known one, a Python file, `FILE.py:FUNCTION`, a command line, a YAML file with its
    settings, or these settings. Raises UsageError if it cannot be started."""
    if not isinstance(agent, str):
        base: Any = {} if "command" in agent or "name" not in agent else read_agent(str(agent["name"]))
        if isinstance(base, PythonAgent):
            given = convert({**agent, "name": base.name}, AgentConfig, path="agent")
            return base._replace(limits=given.limits, tokenizer=given.tokenizer)
        config = convert(deep_merge(msgspec.to_builtins(base), dict(agent)), AgentConfig, path="agent")
    elif agent in known_agents():
        config = known_agents()[agent]
    elif agent.endswith((".yaml", ".yml")):
        return read_agent(load_yaml(Path(agent)))
    elif (named := find_reference(agent)) is not None and named.kind is CodeKind.FILE:
        return PythonAgent(agent, load_object(named, USER))
    else:
        config = AgentConfig(name=agent, command=_split(agent))
    config = msgspec.structs.replace(config, command=[_absolute(word) for word in config.command])
    config.find_programs()
    return config


@cache
def known_agents() -> dict[str, AgentConfig]:
    """The known agents, by name. They do what a model says, so they run in a sandbox."""
    rows = tomllib.loads(TABLE.read_text())
    boxed = {"sandbox": "machine"}
    return {name: msgspec.convert({"name": name, **boxed, **row}, AgentConfig) for name, row in rows.items()}


def _split(agent: str) -> list[str]:
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise UsageError(f"the agent {agent!r} is not a command: {error}") from None
    if not words:
        raise UsageError("no agent given", remedy="--agent my_agent.py, or --agent 'COMMAND ARGUMENTS'")
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"there is no file {words[0]}")
        words = [sys.executable, *words]
    elif len(words) == 1 and shutil.which(words[0]) is None and (hint := did_you_mean(words[0], known_agents())):
        raise UsageError(f"there is no program {words[0]!r}{hint}")
    return words


def _absolute(word: str) -> str:
    return os.path.abspath(word) if os.path.isfile(word) else word  # which, unlike a Path, may be a long text


def _interpreters(program: Path) -> list[Path]:
    """The interpreter that a script names in its first line."""
    with program.open("rb") as file:
        first = file.readline(200)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    found = [path for word in words[:2] if not word.startswith("-") and (path := shutil.which(word)) is not None]
    return [Path(path) for path in found]


def _parts_of(program: Path) -> list[Path]:
    """The files that a program needs: its virtual environment and the Python behind it, its Node packages, or only
    itself."""
    real = program.resolve()
    for place in (program, real):
        if (settings := place.parent.parent / "pyvenv.cfg").is_file():
            return [settings.parent, real.parent.parent] if real.name.startswith("python") else [settings.parent]
        if "node_modules" in place.parts:
            return [Path(*place.parts[: place.parts.index("node_modules") + 1])]
    if real.name.startswith(("python", "node")) and not str(real).startswith(_SYSTEM):
        return [real.parent.parent]
    return [real]
