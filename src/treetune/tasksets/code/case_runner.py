"""Runs an answer on test cases inside a sandbox, as a program that needs only Python. It is sent together with
`time_limit.py`.

Standard input holds the answer as one line of JSON, then one line per case. Standard output gets one line of JSON per
case: what was printed or returned, or the error. It stops at the first failure.

It holds no secret: expected outputs never enter the sandbox. An answer that takes over this process can only write
outputs, which are judged outside. Each case runs in a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
import types
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from treetune.system.time_limit import TimeLimit

NAMES = {
    "bisect": "bisect_left bisect_right insort",
    "collections": "Counter OrderedDict defaultdict deque",
    "copy": "deepcopy",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations count cycle groupby islice pairwise permutations product repeat "
    "zip_longest",
    "math": "atan2 ceil comb factorial floor gcd inf isqrt log log10 log2 pi prod sqrt",
    "operator": "iand itemgetter or_ sub xor",
    "os.path": "commonprefix",
    "random": "randrange shuffle",
    "string": "ascii_lowercase ascii_uppercase",
    "time": "time",
    "typing": "Any Callable Deque Dict Generator Iterable Iterator List Optional Set Tuple Union",
}
"""Names that answers may use without an import, as in LiveCodeBench."""
MODULES = "bisect collections copy datetime functools heapq io itertools math operator os random re string sys".split()
PACKAGES = {"np": "numpy", "pd": "pandas"}
ERROR_BYTES = 2000


def main() -> None:
    # Outside the folder where the cases' streams go.
    source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    answer = json.loads(source.readline())
    names = load_names(answer["code"])
    gc.freeze()  # so that the collector of the child skips what exists already
    for line in source:
        case = CaseProcess(answer, json.loads(line))
        child = os.fork()
        if child == 0:
            case.run(names)
        ended, content = case.wait(child)
        report = {"ended": ended, "content": content.decode(errors="replace")}
        write(sink, json.dumps(report, ensure_ascii=False).encode() + b"\n")
        if ended != "done":
            return


def load_names(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"re_search": re.search}
    for module, wanted in NAMES.items():
        found = __import__(module, fromlist=["*"])
        names.update({name: getattr(found, name) for name in wanted.split() if hasattr(found, name)})
    names.update({module: __import__(module) for module in MODULES})
    for name, package in PACKAGES.items():
        if re.search(rf"\b({name}|{package})\b", code):
            with contextlib.suppress(ImportError):  # an answer that really needs it fails by itself
                names[name] = __import__(package)
    return names


class CaseProcess:
    """Runs one case in a child process whose streams are files."""

    def __init__(self, answer: dict[str, Any], case: dict[str, Any]) -> None:
        self.answer, self.arguments = answer, case["arguments"]
        self.input, self.output, self.error = (tempfile.TemporaryFile(buffering=0) for _ in range(3))  # noqa: SIM115
        write(self.input.fileno(), case["stdin"].encode("utf-8", "surrogatepass"))
        self.input.seek(0)
        self.calls = answer["function"] is not None

    def wait(self, child: int) -> tuple[str, bytes]:
        """Return how it ended, by itself or by timeout, and the message for it."""
        limit = TimeLimit(self.answer["seconds"])
        reaped = status = 0
        while not reaped and (left := limit.left()) > 0:
            signal.sigtimedwait([signal.SIGCHLD], left)
            reaped, status = os.waitpid(child, os.WNOHANG)
        for kill in (os.killpg, os.kill)[: 1 if reaped else 2]:  # the group: everything that it left running
            with contextlib.suppress(OSError):
                kill(child, signal.SIGKILL)
        if not reaped:
            os.waitpid(child, 0)
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if not reaped or killed_by in (signal.SIGXCPU, signal.SIGKILL):
            return "timeout", b""
        if killed_by:
            return "error", f"killed by signal {killed_by}".encode()
        if status:
            full = b"" if os.statvfs(tempfile.gettempdir()).f_bavail else b"its output or its files are too large"
            return "error", read_end(self.error.fileno(), ERROR_BYTES) or full
        return "done", read_end(self.output.fileno())

    def run(self, names: dict[str, Any]) -> NoReturn:
        """Run the case in the child process."""
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        seconds = self.answer["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        output = self.output.fileno()
        printed = os.open(os.devnull, os.O_WRONLY) if self.calls else output  # then it holds only the result
        for place, descriptor in enumerate((self.input.fileno(), printed, self.error.fileno())):
            os.dup2(descriptor, place)
        os.closerange(3, output)
        os.closerange(output + 1, 1024)
        sys.argv = ["answer.py"]
        try:
            exit_as_usual(self.run_answer(names))
        finally:
            os._exit(1)

    def run_answer(self, names: dict[str, Any]) -> int:
        """Run the answer and return the exit code."""
        module = types.ModuleType("answer" if self.calls else "__main__")
        module.__dict__.update(names, __file__="answer.py")
        sys.modules[module.__name__] = module
        try:
            exec(compile(self.answer["code"], "answer.py", "exec"), module.__dict__)  # noqa: S102
            if self.calls:
                holder = module.Solution() if hasattr(module, "Solution") else module
                returned = getattr(holder, self.answer["function"])(*self.arguments)
                value = check_value(list(returned) if isinstance(returned, tuple) else returned)
                write(self.output.fileno(), json.dumps(value).encode())
        except SystemExit:
            return 0  # however a program ends itself, its output counts
        except BaseException as error:
            print(describe(error), file=sys.__stderr__)
            return 1
        return 0


def exit_as_usual(code: int) -> NoReturn:
    """End as any program does: wait for threads, run exit functions, write open files. But the interpreter is not taken
    down, which would cost more than most answers."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.__stdout__, *gc.get_objects()):
        try:
            if isinstance(file, io.IOBase) and not file.closed:
                file.flush()
        except OSError:
            code = code or 1
        except Exception:
            continue  # something that only resembles a file
    os._exit(code)


def check_value(value: Any) -> Any:
    """Return the value if JSON can represent it exactly: a tuple inside a list is not a list, and 1 is not a key."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [check_value(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: check_value(item) for key, item in value.items()}
    raise TypeError(f"the function returned a {type(value).__name__}")


def describe(error: BaseException) -> str:
    places = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "answer.py"]
    said = traceback.format_exception_only(type(error), error)[-1].strip()
    line = error.lineno if isinstance(error, SyntaxError) else places[-1] if places else None
    return f"{said} (line {line})" if line else said


def read_end(descriptor: int, last: int | None = None) -> bytes:
    size = os.fstat(descriptor).st_size
    begin = 0 if last is None else max(0, size - last)
    return os.pread(descriptor, size - begin, begin)


def write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
