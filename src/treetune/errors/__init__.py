"""All user-facing errors: what is wrong, how to fix it, and a code for programs."""

from __future__ import annotations

import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple

Faults = list[tuple[str, str]]
"""The faults of a config, each with the path of its key."""


class TreetuneError(Exception):
    """The base of all errors."""

    exit_code: ClassVar[int] = 3
    """The exit code of the command line."""
    code: str = "failed"
    """Identifies the kind of error for programs. It stays the same if messages change."""

    def __init_subclass__(cls, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.remedy}" if self.remedy else self.message


class UsageError(TreetuneError, code="usage"):
    """The request itself is wrong: a flag, a key, a name."""

    exit_code = 2


UNKNOWN_KEY = "unknown key"
"""The beginning of the fault for an unknown key."""


class ConfigError(UsageError, code="config"):
    """One or more faults in a config, each with the path of the key. The code is `unknown-key` if all faults are
    unknown keys."""

    def __init__(self, faults: Iterable[tuple[str, str]], *, source: str = "config", remedy: str | None = None) -> None:
        self.faults = list(faults)
        self.source = source
        if self.faults and all(problem.startswith(UNKNOWN_KEY) for _, problem in self.faults):
            self.code = "unknown-key"
        places = _find_places(source, self.faults)
        lines = [f"  {places[path]}: {problem}" if path else f"  {problem}" for path, problem in self.faults]
        super().__init__(f"{plural(len(lines), 'fault')} in {source}:\n" + "\n".join(lines), remedy=remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ConfigError, self.faults, source=self.source, remedy=self.remedy), ()


class Declared(NamedTuple):
    """Where a config was declared, for faults that only its data shows."""

    path: str = ""
    """The key of the config."""
    source: str = "config"
    """The file."""
    overridden: frozenset[str] = frozenset()
    """The keys that were overridden on the command line."""

    def place(self, error: ConfigError) -> ConfigError:
        """The same faults, with their keys in that file; those of overrides are written as flags."""
        faults = place_faults(error.faults, self.path)
        faults = [(f"--{key}" if key in self.overridden else key, problem) for key, problem in faults]
        return ConfigError(faults, source=self.source, remedy=error.remedy)


class UnknownNameError(UsageError, code="unknown-name"):
    """The name of a taskset, an environment, a tool or an option is unknown."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], *, remedy: str | None = None) -> UnknownNameError:
        known = sorted(known)
        hint = did_you_mean(name, known)
        listing = f"; known: {', '.join(known)}" if known and not hint else ""
        return cls(f"unknown {kind} {name!r}{hint}{listing}", remedy=remedy)


class UntrustedCode(UsageError, code="untrusted-code"):
    """Data names code, a variable or a server that only the user may choose."""


class PluginError(UsageError, code="code-not-loaded"):
    """A file or module did not provide the class it should."""


class CreditError(UsageError, code="credit"):
    """The credit of turns, or the weight of training rows, is not possible with these settings of a trainer."""


class ResumeError(UsageError, code="cannot-resume"):
    """A run or a saved state cannot be resumed."""


class TasksetError(TreetuneError, code="taskset"):
    """A taskset breaks its contract."""


class DrawFailed(TasksetError, code="draw-failed"):
    """The task of a draw could not be made. It is tried again, or skipped."""


class GeneratorFailed(TasksetError, code="generator-failed"):
    """`load_tasks` raised at the task `place`; that task and later ones were not reached."""

    def __init__(self, message: str, *, remedy: str | None = None, place: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.place = place


class StreamEnded(TasksetError, code="stream-ended"):
    """A stream cannot continue: its generator ended, or keeps failing at the same place after restarts."""


class EmptyTasksetError(TasksetError, code="no-tasks"):
    """A taskset has no tasks."""


class EnvironmentFault(TreetuneError, code="environment"):
    """An environment breaks its contract."""


class InvalidAction(TreetuneError, code="invalid-action"):
    """Raise this in an environment or a scorer for an action that it cannot accept: the action earns `reward` and ends
    the episode, which is scored. Any other error is a failure of the environment, without a reward."""

    def __init__(self, message: str, *, reward: float = 0.0, warning: str | None = None) -> None:
        """`warning` is for the author of the environment; it appears in the trace and in the run's summary."""
        super().__init__(message)
        self.reward, self.warning = reward, warning


class ToolError(TreetuneError, code="tool"):
    """Raise this in a tool for a call that it cannot fulfil: the model gets the message and may continue. For any other
    error, the model also gets its type."""


class PolicyError(TreetuneError, code="policy"):
    """A policy could not answer."""


class ContextFullError(PolicyError, code="context-full"):
    """A prompt is too long for the model. After the first turn, the policy itself made it too long."""


class EndpointRefusal(PolicyError, code="endpoint-refusal"):
    """A model server refused a request, and would refuse it again."""


class StorageError(TreetuneError, code="storage"):
    """A folder or file cannot be written."""


class NetworkError(TreetuneError, code="network"):
    """A hub or an address does not answer."""


class MissingExtraError(TreetuneError, code="missing-extra"):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, what: str, extra: str) -> MissingExtraError:
        return cls(f"{what} is not installed", remedy=f"pip install 'treetune[{extra}]'")


@contextmanager
def writing(path: PurePath, remedy: str | None = None) -> Iterator[None]:
    """Reports an OSError as a `StorageError` that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write to {path}: {error.strerror or error}", remedy=remedy) from error


@cache
def warn_once(text: str) -> None:
    """Shows a warning once per process, even if Python's record of shown warnings is reset."""
    warnings.warn(text, stacklevel=2)


class user_code:
    """Inside this context, every error of user code becomes a `TasksetError` that says where it was raised, with a
    remedy from `suggest`. Treetune's own errors pass unchanged. This is a class because each draw enters it."""

    __slots__ = ("_suggest", "_what")

    def __init__(self, what: str, suggest: Callable[[Exception], str | None] = lambda error: None) -> None:
        self._what, self._suggest = what, suggest

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TreetuneError):
            problem = f"{self._what} failed: {format_error(error)}"
            raise TasksetError(problem, remedy=self._suggest(error)) from error


@contextmanager
def gather_faults(faults: Faults, key: str | None = None) -> Iterator[None]:
    """Collect the faults of a `ConfigError` in `faults` instead of raising it; with a `key`, also any other Treetune
    error, under that key."""
    try:
        yield
    except ConfigError as error:
        faults += error.faults
    except TreetuneError as error:
        if key is None:
            raise
        faults.append((key, str(error)))


def place_faults(faults: Faults, path: str) -> Faults:
    """The faults of a config that is nested under a key of another one."""
    return [(".".join(filter(None, (path, key))), problem) for key, problem in faults]


def check_all(checks: Iterable[tuple[str, Callable[[], object]]], *, source: str = "config") -> None:
    """Run all checks, then raise one `ConfigError` with all faults, each under the place of its check."""
    faults: Faults = []
    others: list[TreetuneError] = []
    for place, check in checks:
        try:
            check()
        except ConfigError as error:
            faults += place_faults(error.faults, place)
        except TreetuneError as error:
            others.append(error)
            faults.append((place, str(error)))
    if len(faults) == len(others) == 1:
        raise others[0]  # keeps its class and remedy
    if faults:
        raise ConfigError(faults, source=source)


def format_error(error: BaseException) -> str:
    """`ValueError: why`; only the type if there is no message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def reason_of(error: BaseException) -> str:
    """The message of a Treetune error; for any other error, also its type."""
    return error.message if isinstance(error, TreetuneError) else format_error(error)


def causes_of(error: BaseException) -> list[BaseException]:
    """The error and its causes, with the first cause last."""
    found = [error]
    while True:
        last = found[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or cause in found:
            return found
        found.append(cause)


def is_of_network(error: BaseException) -> bool:
    """Whether the error or one of its causes means that a server did not answer."""
    for cause in causes_of(error):
        # `subprocess` also raises timeouts, but those are of programs.
        kinds = [kind.__name__ for kind in type(cause).__mro__ if kind.__module__ != "subprocess"]
        if any(part in kind for kind in kinds for part in _NETWORK):
            return True
        if "LocalEntryNotFoundError" in str(cause):  # raised by the hub's library after it gave up
            return True
    return False


def traceback_of(error: BaseException) -> str:
    """Python's traceback of an error. Treetune's own frames are left out of Treetune errors; if no other frame is left,
    the traceback is empty."""
    account = traceback.TracebackException.from_exception(error, compact=True)
    text = "".join(account.format()) if _leave_out_ours(account, error) else ""
    more = len(text) - _LONGEST_ACCOUNT
    half = _LONGEST_ACCOUNT // 2
    return f"{text[:half]}\n... {more:,} characters left out ...\n{text[-half:]}" if more > 0 else text


def _leave_out_ours(account: traceback.TracebackException, error: BaseException) -> bool:
    """Remove our frames; return whether any frame is left in the error or its causes, which may be thousands."""
    left = False
    parts: list[tuple[traceback.TracebackException | None, BaseException | None]] = [(account, error)]
    while parts:
        part, cause = parts.pop()
        if part is None or cause is None:
            continue
        if isinstance(cause, TreetuneError):
            others = [frame for frame in part.stack if not frame.filename.startswith(_PACKAGE)]
            part.stack = traceback.StackSummary.from_list(others)
        left = left or bool(part.stack)
        parts += [(part.__cause__, cause.__cause__), (part.__context__, cause.__context__)]
    return left


def located(error: BaseException) -> str:
    """The error with the line of the user's code that raised it: `ValueError at tasks.py:12: why`."""
    place, text = place_of(error), format_error(error)
    return text.replace(type(error).__name__, f"{type(error).__name__} at {place}", 1) if place else text


def place_of(error: BaseException) -> str:
    """`tasks.py:12`: the last line of the user's code that an error passed through; empty if there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in frames if not place[0].startswith((_PACKAGE, *_LIBRARIES, "<"))]
    return f"{PurePath(own[-1][0]).name}:{own[-1][1]}" if own else ""


_NETWORK = ("ConnectionError", "ConnectError", "OfflineModeIsEnabled", "Timeout", "gaierror")
"""Parts of the class names of errors that libraries raise if a server does not answer."""
_LONGEST_ACCOUNT = 20_000
_MOST_ENTRIES = 5000
"""The maximum number of entries of a folder to compare; each comparison takes 20 microseconds."""
_PACKAGE = str(PurePath(__file__).parent.parent)
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def _find_places(source: str, faults: Faults) -> dict[str, str]:
    """The key of each fault as spelled in the config; for a file, with its line."""
    keys = [key for key, _ in faults]
    if not source.endswith((".yaml", ".yml")):
        return {key: key for key in keys}
    import yaml  # only needed for errors

    try:
        top = yaml.compose(Path(source).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError):
        top = None
    missing = {key for key, problem in faults if problem.startswith("is required")}
    return {key: _name_missing(top, key) if key in missing else _find_place(top, key) for key in keys}


def _find_place(top: Any, key: str) -> str:
    found = [(line, spelling) for spelling in _spellings(top, key) if (line := _find_line(top, spelling)) is not None]
    if not found:
        return _name_missing(top, key)
    lines, spellings = zip(*found, strict=True)
    return f"line {' or '.join(map(str, lines))}, {' or '.join(spellings)}"


def _name_missing(top: Any, key: str) -> str:
    """The spelling of a key that is missing from the file, without a line."""
    fitting = [each for each in _spellings(top, key) if _find_line(top, each.rpartition(".")[0]) is not None]
    return fitting[0] if len(fitting) == 1 else key


def _spellings(top: Any, key: str) -> Iterator[str]:
    """The key, and the forms that it can have in a file that declares the taskset in a list."""
    yield key
    for name in ("train_tasks", "val_tasks") if re.match(r"taskset\b", key) else ():
        if _find_line(top, name) is not None:
            of_several = re.match(r"taskset\.sources(\[\d+\])", key)
            yield re.sub(r"^taskset(\.sources\[\d+\])?", f"{name}{of_several[1] if of_several else '[0]'}", key)


def _find_line(node: Any, key: str) -> int | None:
    import yaml

    line = None
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.MappingNode):
            pairs = [(name, value) for name, value in node.value if name.value == part]
            if not pairs:
                return None
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            return None
    return line


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or empty if no known name is similar."""
    import difflib  # only needed for errors

    by_folded = {candidate.casefold(): candidate for candidate in known}
    folded = name.casefold()
    matches = difflib.get_close_matches(folded, list(by_folded), cutoff=0.6)
    alike = [difflib.SequenceMatcher(None, match, folded).ratio() for match in matches]
    near = [by_folded[match] for match, ratio in zip(matches, alike, strict=True) if ratio > alike[0] - 0.15]
    return f"; did you mean {join_names(near)}?" if near else ""


def suggest_file(path: str | PurePath) -> str:
    """`; did you mean 'train.jsonl'?`: files in the same folder with a similar name."""
    try:
        file = Path(path).expanduser()
        entries = islice(file.parent.iterdir(), _MOST_ENTRIES)
        return did_you_mean(file.name, [entry.name for entry in entries if entry.name != file.name])
    except (OSError, RuntimeError):  # the folder or the user does not exist either
        return ""


def plural(number: int, thing: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def truncate(text: str, most: int) -> str:
    """The text on one line, of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def join_names(names: Iterable[str]) -> str:
    """`'a' or 'b'`."""
    return " or ".join(map(repr, names))
