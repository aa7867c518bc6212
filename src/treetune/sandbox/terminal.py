"""The persistent shell of a sandbox: an interactive bash on its own terminal. It is sent into the sandbox together with
`runner.py`.

bash never reads a command from its terminal, whose lines are short and which the command itself may read. It reads one
line there that takes the command from a pipe. A mark that bash prints before each prompt signals that the command has
ended. Nested shells (`su - jack`) get both from the system's start-up files.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` brings `enum`, a tenth of a start
import fcntl
import os
import select
import struct
import sys
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from treetune.system.time_limit import TimeLimit

COMMANDS, TERMINAL = 201, 202
"""Descriptors of every shell here: where commands come from, and the terminal on which marks are printed."""
NEXT = (
    '__tt=$?;__tt_number={};IFS= \\builtin read -r -d "" -u {} __tt_command;'
    '__tt(){{ \\builtin return $__tt;}};__tt;\\builtin eval "$__tt_command"\n'
)
"""Takes a command from the pipe and runs it, with `$?` of the previous one."""
INTERRUPT_SECONDS = 0.5
START_SECONDS = 30.0
RESTART_SECONDS = 3.0
CHUNK = 1 << 16
ROWS, COLUMNS = 50, 200
BECOME_BASH = '[ -n "$BASH_VERSION" ] || case $- in *i*) exec bash --login;; esac'
"""A different shell at the terminal (`su - jack`, whose shell is dash) could not take commands from the pipe."""
START_UP_FILES = ("/etc/bash.bashrc", "/etc/profile.d/treetune.sh")
RTLD_NOW = 2
CAPABILITIES_VERSION_3 = 0x20080522
CAP_LEASE = 28
"""This capability is not used otherwise, but a process without it cannot inspect a process that has it. The shell and
its children lack it."""


class Output:
    """The beginning and the end of a command's output."""

    def __init__(self, limit: int, watched: bool = False) -> None:
        self.half = limit // 2
        self.first, self.last, self.written = b"", b"", 0
        self.to_show = limit if watched else 0

    def add(self, chunk: bytes) -> None:
        self.written += len(chunk)
        if chunk and self.to_show > 0:
            reply({"partial": True}, chunk[: self.to_show])
            self.to_show -= len(chunk)
        room = max(0, self.half - len(self.first))
        self.first += chunk[:room]
        self.last = (self.last + chunk[room:])[-self.half :]

    @property
    def content(self) -> bytes:
        return self.first + self.last


class Children:
    """Reaps every process that ends here, as the first process of a sandbox must."""

    def __init__(self) -> None:
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.waited: dict[int, int | None] = {}
        """The processes that a caller waits for, and how they ended."""

    def start(self, command: list[str], env: dict[str, str], cwd: str, ends: dict[int, int], terminal: bool) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                for signal_number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(signal_number, signal.SIG_DFL)
                for number, end in ends.items():
                    os.dup2(end, number)
                if terminal:
                    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
                    drop_capability()
                os.closerange(3, COMMANDS) if terminal else os.closerange(3, 1024)
                write_file("/proc/self/oom_score_adj", b"500")
                os.chdir(cwd)
                os.execvpe(command[0], command, env)
            except BaseException as error:
                os.write(2, f"{command[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        self.waited[pid] = None
        return pid

    def reap(self, options: int = os.WNOHANG) -> None:
        if select.select([self.woken], [], [], 0)[0]:
            os.read(self.woken, CHUNK)
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.waited:
                self.waited[pid] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def kill_all(self) -> None:
        """Kill every process here except this one. Orphans become children of this process."""
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.reap(0)


class Terminal:
    def __init__(self, children: Children, copied: bool) -> None:
        """`copied`: the start-up files belong to a terminal like this one."""
        self.children = children
        self.mark = (find_mark() if copied else "") or os.urandom(8).hex()
        self.begin = b"\x1e" + self.mark.encode()
        self.prompt = f'printf "\\036{self.mark} %s %s\\036" "$__tt_number" "$?" >&{TERMINAL};PS1= PS2='
        hook = f"[ ! -t {TERMINAL} ] || {{ PROMPT_COMMAND='{self.prompt}'; {BECOME_BASH}; }}"
        for path in () if copied else START_UP_FILES:
            try:
                with open(path, "a") as file:
                    file.write(f"\n{hook}\n")
            except OSError:
                pass  # then only the first shell has it
        self.master = self.feed = -1
        self.ignored = False
        """Whether the shell ignored the last command."""
        self.busy = False
        """Whether a command is running. No request comes then, so anything readable from the other end means that it
        has closed."""
        self.number = 0
        self.idle = Output(CHUNK)
        """Output of background processes between commands; it is shown with the next command."""
        if not self.spawn(START_SECONDS):
            sys.exit("bash does not start in this sandbox")

    def spawn(self, seconds: float = RESTART_SECONDS) -> bool:
        """Start the shell; return whether it reached its prompt."""
        for old in (self.master, self.feed):
            if old >= 0:
                os.close(old)
        self.buffer = b""
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.modes = termios.tcgetattr(slave)
        self.modes[1] &= ~termios.ONLCR
        self.modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, self.modes)
        reading, self.feed = os.pipe()
        os.set_blocking(self.feed, False)
        ends = {0: slave, 1: slave, 2: slave, TERMINAL: slave, COMMANDS: reading}
        env = {**os.environ, "PROMPT_COMMAND": self.prompt, "PS1": "", "PS2": "", "TERM": "dumb"}
        while True:
            try:
                self.pid = self.children.start(["bash", "--login", "--noediting", "-i"], env, find_home(), ends, True)
                break
            except BlockingIOError:
                self.children.kill_all()  # too many processes leave no room for a shell
        os.close(slave)
        os.close(reading)
        if self.wait(Output(CHUNK), TimeLimit(seconds)) is None:
            return False
        self.take(b"export -n PROMPT_COMMAND PS1 PS2; unset OLDPWD", Output(CHUNK), TimeLimit(seconds))
        return True

    def take(self, command: bytes, output: Output, limit: TimeLimit, exact: bool = False) -> int | None:
        """Give the shell a command and wait until a shell is at its prompt again; None if time ran out."""
        self.number += 1
        termios.tcsetattr(self.master, termios.TCSANOW, self.modes)  # a command may have changed them
        self.ignored = False
        left = memoryview(command + b"\0")
        os.write(self.master, NEXT.format(self.number, COMMANDS).encode())
        while left and limit.left() > 0 and not self.has_ended():
            try:
                left = left[os.write(self.feed, left[:4096]) :]
            except BlockingIOError:
                self.read(output, 0.005)
                if self.find_report():
                    break  # it has stopped reading
            except BrokenPipeError:
                self.ignored = True
                break
        code = self.wait(output, limit, exact)
        if code is not None and any(fcntl.ioctl(self.feed, termios.FIONREAD, bytes(4))):
            self.ignored = True
        return code

    def wait(self, output: Output, limit: TimeLimit, exact: bool = False) -> int | None:
        """Return the exit code once a shell is at its prompt, or has ended; None if time ran out. Unless `exact`, this
        may be a different shell from the one that took the command (`su`, or `exit` from it)."""
        while True:
            report = self.find_report()
            if report:
                before, (number, code), self.buffer = report
                output.add(before)
                if exact and number != b"%d" % self.number:
                    continue
                return int(code)
            ended = self.children.waited[self.pid]
            if ended is not None:
                while self.read(output, 0):
                    pass
                output.add(self.buffer)
                self.buffer = b""
                return ended
            left = limit.left()
            if left <= 0:
                return None
            self.read(output, left)

    def find_report(self) -> tuple[bytes, list[bytes], bytes] | None:
        """Return the output before a report, the report (number of a command, its exit code), and the output after
        it."""
        before, begun, rest = self.buffer.partition(self.begin)
        report, ended, after = rest.partition(b"\x1e")
        words = report.split(b" ")[1:]
        if not begun or not ended or len(words) != 2 or not words[1].isdigit():
            return None
        return before, words, after

    def read(self, output: Output, seconds: float) -> bool:
        watched = [self.master, self.children.woken, *([0] if self.busy else [])]
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if 0 in ready:
            os._exit(0)  # no caller waits for the answer any more
        if self.children.woken in ready:
            self.children.reap()
        if self.master not in ready:
            return False
        try:
            chunk = os.read(self.master, CHUNK)
        except OSError:
            chunk = b""  # no process has the terminal open any more
            time.sleep(0.002)
        self.buffer += chunk
        if not self.find_report():
            # A report may have started; everything else is output.
            begun = self.buffer.rfind(b"\x1e", -len(self.mark) - 32)
            kept = self.buffer[begun:] if begun >= 0 else b""
            output.add(self.buffer[: len(self.buffer) - len(kept)])
            self.buffer = kept
        return bool(chunk)

    def execute(self, request: dict[str, Any], command: bytes) -> tuple[dict[str, Any], bytes]:
        most = request["output_bytes"]
        output = Output(most, request["watched"])
        self.busy = True
        if self.has_ended():
            self.restart()  # a background process ended it
        limit = TimeLimit(request["seconds"])
        exit_code = self.take(command, output, limit)
        restarted = self.ignored
        if self.ignored and not self.has_ended():
            # Its descriptors were changed, so it no longer takes commands.
            self.restart()
            exit_code = self.take(command, output, limit)
        lives = exit_code is not None or self.interrupt(output)
        if not lives or self.has_ended():
            self.restart()
            restarted = True
        self.busy = False
        content = (self.idle.content + output.content)[:most]
        written = len(self.idle.content) + output.written
        self.idle = Output(CHUNK)
        answer = {"exit_code": exit_code, "restarted": restarted, "written": written, "stdout": len(content)}
        return answer, content

    def has_ended(self) -> bool:
        return self.children.waited[self.pid] is not None

    def restart(self) -> None:
        """Start a new shell. If that does not reach its prompt either (bash was replaced), commands end at their
        deadline."""
        self.end()
        if not self.spawn():
            self.children.kill_all()  # too many processes leave it no room
            self.end()
            self.spawn()

    def interrupt(self, output: Output) -> bool:
        """Send Ctrl-C, then kill the foreground command; False if the shell must be killed too."""
        os.write(self.master, b"\x03")
        code = self.wait(output, TimeLimit(INTERRUPT_SECONDS))
        if code is None:
            try:
                group = os.tcgetpgrp(self.master)
                if group > 1 and group != self.pid:
                    os.killpg(group, signal.SIGKILL)
                    code = self.wait(output, TimeLimit(INTERRUPT_SECONDS))
            except OSError:
                pass
        if code is not None and not self.has_ended():
            # Ctrl-C may reach a shell at its prompt, which then prints its mark twice.
            code = self.take(b":", output, TimeLimit(INTERRUPT_SECONDS), exact=True)
        return code is not None

    def end(self) -> None:
        while not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            select.select([self.children.woken], [], [], 0.01)
            self.children.reap()
        del self.children.waited[self.pid]


def find_mark() -> str:
    """Return the mark in the start-up files, which another terminal wrote."""
    for path in START_UP_FILES:
        try:
            with open(path, errors="replace") as file:
                _, found, after = file.read().rpartition('printf "\\036')
        except OSError:
            continue
        if found:
            return after[:16]
    return ""


def write_file(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def drop_capability() -> None:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    sets = [int(fields[name], 16) & ~(1 << CAP_LEASE) for name in ("CapEff", "CapPrm", "CapInh")]
    words = [part >> shift & 0xFFFFFFFF for shift in (0, 32) for part in sets]
    call("capset", struct.pack("Ii", CAPABILITIES_VERSION_3, 0), struct.pack("6I", *words))


def call(function: str, *arguments: Any) -> None:
    """Call a function of the C library; `ctypes` itself is slow to load."""
    try:
        import _ctypes

        library = _ctypes.dlopen(None, RTLD_NOW)  # type: ignore[arg-type]
        _ctypes.call_function(_ctypes.dlsym(library, function), arguments)
    except (ImportError, OSError, AttributeError):
        pass  # this Python lacks it: one barrier less


def find_home() -> str:
    place = os.environ.get("HOME", "/")
    return place if os.path.isdir(place) else "/"


def reply(header: dict[str, Any], content: bytes = b"") -> None:
    members = ",".join(f'"{name}":{encode_json(value)}' for name, value in {**header, "size": len(content)}.items())
    left = memoryview(b"{%s}\n" % members.encode() + content)
    while left:
        left = left[os.write(1, left) :]


def encode_json(value: float | None) -> str:
    """Encode a value that occurs in answers: numbers, true, false and null."""
    return "null" if value is None else repr(value).lower()
