"""Sandboxes with a shell, from this process or from one of an ordinary user.

    place.play(my_async_function, argument)     # awaited there, with a fresh event loop

As root, the tests of an ordinary user run in a process that has become one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from treetune.sandbox import Result, SandboxLimits, probe
from treetune.sandbox.shell import Shell

NOBODY = 65534


class Place:
    def __init__(self, executor: ProcessPoolExecutor | None, own_users: bool) -> None:
        self._executor, self.own_users = executor, own_users

    def play(self, function: Any, *arguments: Any) -> Any:
        if self._executor is None:
            return asyncio.run(function(*arguments))
        return self._executor.submit(_play, function, *arguments).result(timeout=120)

    def shell(self, *commands: str, **limits: Any) -> list[Result]:
        """What commands in one shell gave."""
        results = self.play(in_shell, commands, limits)
        assert isinstance(results, list)
        return results


def _play(function: Any, *arguments: Any) -> Any:
    return asyncio.run(function(*arguments))


async def in_shell(commands: tuple[str, ...], limits: dict[str, Any]) -> list[Result]:
    async with await Shell.open(SandboxLimits(**{"seconds": 20, **limits})) as shell:
        return [await shell.execute(command) for command in commands]


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")


KINDS = [
    pytest.param(kind, marks=pytest.mark.thorough) if (kind == "root") != (os.geteuid() == 0) else kind
    for kind in ("root", "user")
]
"""Who starts the sandbox: by default whoever runs the tests."""


def places(kind: str) -> Iterator[Place]:
    """One place of a kind, `root` or `user`; skips where there is none."""
    if kind == "root" or os.geteuid() != 0:
        if (kind == "root") != (os.geteuid() == 0):
            pytest.skip("the tests are not run as root")
        capability = probe(shell=True)
        if capability.launcher is None:
            pytest.skip(str(capability))
        yield Place(None, capability.launcher.own_users)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_become_nobody) as executor:
        capability = executor.submit(probe, shell=True).result()
        if capability.launcher is None:
            pytest.skip(str(capability))
        yield Place(executor, capability.launcher.own_users)
