"""Tools of MCP servers, with the official SDK: a program that runs for each episode, or a URL.

    tools: [{mcp: {command: [python, server.py]}}]      # in a config

`McpServer` says how to reach a server. It comes from a config or from code, never from a row, because it names a
program to run or a URL to call. `tools` has the tools and their session, `transports` the process and the HTTP client.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from treetune.config.interpolation import conceal
from treetune.errors import UsageError

Seconds = Annotated[float, msgspec.Meta(gt=0)]
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,32}")


class McpServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: list[str] | None = None
    """The program and its arguments, run once per episode, without a shell."""
    env: dict[str, str] = {}
    """Environment variables for the program, in addition to PATH, HOME and the language. It gets no other variables."""
    cwd: str | None = None
    """The working folder of the program; by default that of this process."""
    url: str | None = None
    """The URL of a running server (streamable HTTP); each episode has its own session there."""
    headers: dict[str, str] = {}
    """Headers sent with each request to the URL."""
    token_env: str | None = None
    """The variable that holds the token for the URL: `Authorization: Bearer ...`."""
    prefix: str = ""
    """A prefix for the names of its tools, for two servers with tools of the same name."""
    only: list[str] | None = None
    """The tools to offer, by the server's names; by default all."""
    timeout: Seconds = 60.0
    """Timeout of a call in seconds. The model reads that it took too long, and may continue."""
    start_timeout: Seconds = 30.0
    """Timeout in seconds until the server has listed its tools."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command: [program, argument] or url: http://...")
        if self.command is not None:
            if not self.command or not self.command[0]:
                raise ValueError("command names no program: write [program, argument]")
            if self.headers or self.token_env is not None:
                raise ValueError("headers and token_env belong to a url, not to a command: use env")
        if self.url is not None:
            if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
                raise ValueError(f"{self.url!r} is not an address: write http://HOST:PORT/mcp")
            if self.env or self.cwd is not None:
                raise ValueError("env and cwd belong to a command, not to a url")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix {self.prefix!r}: use at most 32 letters, digits, _ and -")

    @property
    def shown(self) -> str:
        """Its name in messages. Values from the environment appear as they were written."""
        if self.command is not None:
            return shlex.join(conceal(self.command, "command"))
        parts = urlsplit(str(conceal(self.url, "url")))
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    def variables(self) -> dict[str, str]:
        """The program's environment variables."""
        return {name: os.environ[name] for name in _INHERITED if name in os.environ} | self.env

    def all_headers(self) -> dict[str, str]:
        if self.token_env is None:
            return dict(self.headers)
        if not (token := os.environ.get(self.token_env)):
            problem = f"the variable {self.token_env} holds no token for {self.shown}"
            raise UsageError(problem, remedy=f"export {self.token_env}=..., where Treetune runs")
        return {**self.headers, "Authorization": f"Bearer {token}"}
