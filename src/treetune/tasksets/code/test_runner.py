"""Runs a problem's tests on an answer inside a sandbox: a separate program that needs only Python.

Standard input holds one JSON object: the answer's code, the code that the tests need, the tests. Standard output gets
one JSON object: how many tests passed, and why the first failing one failed.

The answer runs in its own process, which never sees the tests. It cannot inspect the tests' process, which calls the
answer's functions over a pipe and gets plain values back. An object that claims to equal everything stays in the
answer's process. An answer that ends the tests' process leaves no verdict, and has failed.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
import types
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4
MOST_ITEMS = 100_000
"""How many items of an iterator are taken: it may be infinite."""
ERROR_CHARACTERS = 300


# The tests' process


def main() -> None:
    # Otherwise the answer could read the tests, or write the verdict, in this process's folder below /proc.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.loads(sys.stdin.buffer.read())
    sink = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
    passed, why = run_tests(request)
    os.write(sink, json.dumps({"passed": passed, "why": why[:ERROR_CHARACTERS]}).encode())
    os._exit(0)  # the answer's process ends with the sandbox


def run_tests(request: dict[str, Any]) -> tuple[int, str]:
    answer = AnswerProcess(request["code"], request["cpu_seconds"])
    if answer.fault is not None:
        return 0, answer.fault
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(request["setup"], "setup.py", "exec"), names)  # noqa: S102
    entry_point = request["entry_point"]
    if entry_point is not None:
        names[entry_point] = RemoteFunction(answer, entry_point)  # the setup may define it without its body
    for number, test in enumerate(request["tests"]):
        try:
            tree = ast.parse(test)
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            defined = names.keys() | vars(builtins).keys()
            names.update({name: RemoteFunction(answer, name) for name in used - defined if answer.defines(name)})
            exec(compile(tree, "tests.py", "exec"), names)  # noqa: S102
            if entry_point is not None:
                names["check"](names[entry_point])
        except BaseException as error:
            return number, describe(error, test)
    return len(request["tests"]), ""


def describe(error: BaseException, test: str) -> str:
    said = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "tests.py"]
    line = test.split("\n")[lines[-1] - 1].strip() if lines and lines[-1] else ""
    return f"{line}: {said}" if line else said


class AnswerProcess:
    """The process that runs the answer."""

    def __init__(self, code: str, cpu_seconds: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", __file__, "answer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        reply = self.ask({"code": code, "cpu_seconds": cpu_seconds})
        self.fault: str | None = reply.get("error")
        self._names = set(reply.get("names") or ())

    def defines(self, name: str) -> bool:
        return name in self._names

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            reply = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.wait(timeout=1) == -signal.SIGXCPU:
                    return {"error": f"did not end within {self._cpu_seconds} seconds of processor time"}
            return {"error": "the answer ended its process"}
        return reply if isinstance(reply, dict) else {"error": "the answer wrote something other than a reply"}

    def call(self, function: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        request = {"call": function, "arguments": encode(arguments), "keywords": encode(keywords)}
        reply = self.ask(request)
        if "error" in reply:
            kind: Any = getattr(builtins, str(reply.get("kind")), None)
            usual = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, AssertionError)
            raise (kind if usual else RuntimeError)(str(reply["error"])[:ERROR_CHARACTERS])
        return decode(reply.get("value"), self)


class RemoteFunction:
    """A function that the answer defines."""

    def __init__(self, answer: AnswerProcess, name: str) -> None:
        self._answer = answer
        self.reference: dict[str, Any] = {"name": name}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._answer.call(self.reference, arguments, keywords)


class RemoteObject(RemoteFunction):
    """An object that the answer created and that is not a plain value. It equals only itself."""

    def __init__(self, answer: AnswerProcess, number: int) -> None:
        self._answer = answer
        self.reference = {"object": number}


# Values sent between the two processes


def encode(value: Any, keep: Any = None) -> Any:
    """Encode a value with its type as JSON; `keep` stores an object that JSON cannot hold, and returns its number."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, RemoteFunction):
        return {"kind": "remote", "of": value.reference}
    if isinstance(value, (int, float)):  # its class may be the answer's own
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, complex):
        return {"kind": "complex", "of": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"kind": "bytes", "of": bytes(value).hex()}
    if isinstance(value, dict):
        return {"kind": "dict", "of": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset, range, collections.deque):
        if isinstance(value, kind):
            return {"kind": kind.__name__, "of": [encode(item, keep) for item in value]}
    if keep is None:
        raise TypeError(f"a {type(value).__name__} cannot be given to the answer")
    if hasattr(value, "__next__"):
        items = []
        for item in value:
            items.append(encode(item, keep))
            if len(items) > MOST_ITEMS:
                raise OverflowError("the iterator does not end")
        return {"kind": "iterator", "of": items}
    return {"kind": "object", "of": keep(value)}


def decode(value: Any, answer: AnswerProcess | None = None, objects: Any = None) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without its type")
        return value
    kind, content = value["kind"], value["of"]
    if kind == "dict":
        return {decode(key, answer, objects): decode(item, answer, objects) for key, item in content}
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "object" and answer is not None:
        return RemoteObject(answer, int(content))
    if kind == "remote" and objects is not None:
        return objects(content)
    items = [decode(item, answer, objects) for item in content]
    if kind == "range":
        return range(items[0], items[-1] + 1, items[1] - items[0]) if len(items) > 1 else items
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
    return iter(items) if kind == "iterator" else kinds[kind](items)


# The answer's process


def serve_answer() -> NoReturn:
    """Run the answer's definitions, and call its functions on request."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    first = json.loads(source.readline())
    seconds = first["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    kept: list[Any] = []

    def find(reference: dict[str, Any]) -> Any:
        return getattr(module, reference["name"]) if "name" in reference else kept[reference["object"]]

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def reply(made: dict[str, Any]) -> None:
        sink.write(json.dumps(made).encode() + b"\n")
        sink.flush()

    try:
        exec(compile(first["code"], "answer.py", "exec"), vars(module))  # noqa: S102
    except BaseException as error:
        reply({"error": traceback.format_exception_only(type(error), error)[-1].strip()})
        os._exit(1)
    reply({"names": sorted(name for name, value in vars(module).items() if callable(value))})
    for line in source:
        request = json.loads(line)
        try:
            arguments = decode(request["arguments"], objects=find)
            value = find(request["call"])(*arguments, **decode(request["keywords"], objects=find))
            made = {"value": encode(value, keep)}
        except BaseException as error:
            made = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
        reply(made)
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):
        sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10_000)
    serve_answer() if sys.argv[1:] == ["answer"] else main()
