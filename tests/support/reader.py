"""A reader of the docs, who copies every block as it stands and does with it what the page says.

    Reader(page, folder, treetune, {}).read()               # raises where something shown is not true

- A block whose first line is `# file: NAME`, or before which a line ends with "`NAME`:", is written to that file.
- A `bash` block is typed into a shell. A server that it starts runs until the page is read, as in another terminal. A
  comment `# exits with 1` says what a command that is meant to fail exits with.
- A `python` block without a name is run as a program, and so is a Python file that no later block names.
- A `text` block right below a `bash` block is what its commands print: the lines are found there in this order, and
  `...` stands for anything.

Nothing is changed but this: ports are other ones, for pages are read side by side; behind `:8000/v1` is a model that
follows a script (`scripted_chat`); `examples` is the folder of the repository; a training is planned (`--dry-run`).
What needs more than a machine without GPUs and without a network has is not run, for a reason that `WHY_NOT` or
`NOT_THERE` names.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import command_line
from scripted_chat import scripted_chat
from task_servers import free_port

from treetune.sandbox import probe

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<kind>\w*)\n(?P<body>.*?)^(?P=indent)(?P=fence)$", re.S | re.M)
CAPTION = re.compile(r"`([^`\n]+)`:\n\n$")
PORT = re.compile(r"(?<![\w.])(?:(127\.0\.0\.1|localhost|0\.0\.0\.0)?:|(--port ))(\d{4})\b")
LISTENS = re.compile(r"--(?:zmq|http|openenv|port|metrics) \S*?(\d{4,5})\b")
SERVES = re.compile(r"(\w+=\S+ )*treetune (serve|register|view|gateway(?! verify))\b(?!.* --mcp$)(?!.* --export)")
"""Commands that go on until they are ended."""
WHY_NOT = {
    r"^pip |install_hook": "changes the reader's Python; .ci/run installs the package as the README says",
    r"^python3 -m venv|^ruff|^python -m (tests|benchmarks)|pytest|docs/_site": "the tests and checks themselves",
    r"^apt-get |treetune sandbox build|--rootfs": "changes the machine; tests/sandbox/test_sandbox_machines.py",
    r"docker": "needs a Docker engine; tests/sandbox/test_shell_docker.py",
    r"gateway (verify \S+ )?-m local": "needs the weights of a model; tests/gateway/test_command.py",
    r"vllm serve|vllm:": "needs vLLM and a GPU; tests/trainers/test_cpu_training.py runs one for CPUs",
    r"--log (wandb|mlflow)|--log tensorboard": "needs the logger's package; tests/loggers/test_loggers_real.py",
    r"ray start|get-auth-token|--engine ray": "needs Ray and several machines; tests/serve/test_pool_ray.py",
    r"^python -m (treetune\.trainers\.)?skyrl": "needs SkyRL and GPUs; tests/trainers/test_skyrl.py",
    r"skyrl:my_env": "needs skyrl-gym; tests/trainers/test_skyrl.py",
    r"my_recipe\.py|treetune_recipe": "needs verl and GPUs; tests/trainers/test_verl.py",
    r"^python train\.py --prompt-data": "needs slime and GPUs; tests/trainers/test_slime.py",
    r"(cpu|agent)_training\.py|curves\.py": "takes up to an hour; tests/trainers/test_cpu_training.py",
    r"python (tiny|train)\.py": "needs TRL; tests/trainers/test_trl.py",
    r"vf-eval|verifiers:": "needs verifiers; tests/trainers/test_verifiers_export.py",
    r"AgentBench|agentbench:|os_interaction/": "needs a checkout of AgentBench; tests/builtin/test_agentbench.py",
    r"^treetune \w+ harbor": "needs tasks of Harbor's and a sandbox; tests/builtin/test_harbor.py",
    r"--log (wandb|mlflow)": "needs their packages; tests/loggers/test_loggers_real.py",
    r"treetune push": "needs a token of the hub; tests/rows/test_push.py",
    r"local:(model|trained)|runs/untrained|tiny\.py model|^python curve": "needs TRL; tests/test_docs.py reads it so",
    r"local:path": "needs the weights of a model; tests/evaluation/test_local_model.py",
    r"guess-a-number --http|treetune probe": "needs the package just made; tests/cli/test_init.py",
}
"""Commands that are not run: each kind, and why, with the tests that do it where what they need is there."""
NOT_THERE = {
    "hydra": ("hydra", "verl's config; tests/trainers/test_verl.py"),
    "skyrl": ("skyrl", "SkyRL; tests/trainers/test_skyrl.py"),
    "treetune.trainers.skyrl": ("skyrl_gym", "skyrl-gym; tests/trainers/test_skyrl.py"),
    "areal": ("areal", "AReaL; tests/trainers/test_areal.py"),
    "treetune.trainers.areal": ("areal", "AReaL; tests/trainers/test_areal.py"),
    "trl": ("trl", "TRL; tests/trainers/test_trl.py"),
    "torch": ("torch", "torch; tests/trainers/test_trl.py"),
    "ray": ("ray", "Ray"),
    "transformers": ("transformers", "transformers; tests/gateway/test_agent_traces.py"),
    "verifiers": ("verifiers", "verifiers; tests/trainers/test_verifiers_targets.py"),
    "inspect_ai": ("inspect_ai", "Inspect"),
    "skyrl_gym": ("skyrl_gym", "skyrl-gym; tests/trainers/test_skyrl_gym.py"),
    "pandas": ("pandas", "pandas"),
    "openenv": ("openenv", "OpenEnv's own client; tests/serve/test_openenv_real.py"),
}
"""What a block of Python imports, the package that this needs, and whose it is. Where the package is missing the block
is not run, but read: what it takes from Treetune must be there."""


class Block(NamedTuple):
    page: Path
    line: int
    kind: str
    name: str | None
    body: str
    is_output: bool

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    found: list[Block] = []
    end, before = 0, ""
    for fence in FENCE.finditer(text):
        between = text[end : fence.start()]
        body = textwrap.dedent(fence["body"]) if fence["indent"] else fence["body"]
        named = re.match(r"# file: (\S+)\n", body) or CAPTION.search(between)
        is_output = fence["kind"] == "text" and before == "bash" and not between.strip()
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence["kind"], named and named[1], body, is_output))
        end, before = fence.end(), fence["kind"]
    return found


def commands_of(body: str) -> list[str]:
    """The commands of a `bash` block: lines, those that end with a backslash together with the next."""
    lines = re.sub(r"^(pip [^&\n]*) && ", r"\1\n", body.replace("\\\n", " "), flags=re.M).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


TRAINS = re.compile(r"treetune train (?!.*--dry-run)")
"""What needs a trainer and, for most of them, GPUs: its plan is made (`--dry-run`), and not carried out. It is in
tests/trainers/test_cpu_training.py."""


def why_not(command: str) -> str | None:
    """Why a command is not run; None where it is."""
    return next((reason for kind, reason in WHY_NOT.items() if re.search(kind, command)), None)


def is_runnable(body: str) -> bool:
    """Whether a program in Python finds here what it imports."""
    nodes = list(ast.walk(ast.parse(body)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    needed = {
        package for name, (package, _) in NOT_THERE.items() if any(f"{one}.".startswith(f"{name}.") for one in names)
    }
    sandboxed = any(name.startswith("treetune.sandbox") for name in names)
    return all(map(importlib.util.find_spec, needed)) and (not sandboxed or probe(shell=True).launcher is not None)


def is_for_shell(command: str) -> bool:
    """Whether a command is more than `treetune` or a program in Python with arguments, or `export`."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", command.partition(" #")[0])
    return not re.match(r"(treetune|export|python [\w/]+\.py\b)( |$)", plain) or bool(re.search(r"[|&;<>$`*~]", plain))


class Reader:
    def __init__(
        self,
        page: Path,
        folder: Path,
        treetune: Callable[..., command_line.Result],
        environment: dict[str, str],
        why_not: Callable[[str], str | None] = why_not,
        python: Callable[[Path, list[str]], command_line.Result] | None = None,
    ) -> None:
        """`treetune` runs the command, and `python` a program; without it, programs run in this process."""
        self.page, self.folder, self.treetune, self.why_not = page, folder, treetune, why_not
        self.python = python or self._run_here
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")
        self.environment = {"COLUMNS": "100", "HOME": str(folder / "home"), **environment}
        self.ports: dict[str, int] = {}
        self.printed = ""

    def _run_here(self, program: Path, arguments: list[str]) -> command_line.Result:
        return command_line.run_script(self.folder, program, arguments, self.environment)

    def read(self) -> None:
        """Goes through the page."""
        blocks = blocks_of(self.page)
        with contextlib.ExitStack() as self.running:
            if "8000" not in self.ports and any(":8000/v1" in block.body for block in blocks):
                url = self.running.enter_context(scripted_chat())
                self.ports["8000"] = int(url.rpartition(":")[2].partition("/")[0])
            for number, block in enumerate(blocks):
                later = "\n".join(other.body for other in blocks[number + 1 :])
                self._do(block, later)

    def _do(self, block: Block, later: str) -> None:
        body = PORT.sub(self._other_port, block.body)
        if block.is_output and self.printed:  # nothing is printed where nothing was run
            assert_shown(body, self.printed, block)
        elif block.kind == "bash":
            self.printed = ""
            run = [command for command in commands_of(body) if self.why_not(command) is None]
            self._type([self._planned(command) for command in run], block)
        elif block.name:
            (self.folder / block.name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.name).write_text(body)
            if block.kind == "python" and not re.search(rf"\b{Path(block.name).stem}\b", later):
                self._run(self.folder / block.name, block)
        elif block.kind == "python":
            program = self.folder / f"line_{block.line}.py"
            program.write_text(body)
            self._run(program, block)

    def _planned(self, command: str) -> str:
        return f"{command} --dry-run" if TRAINS.match(command) and self.why_not is why_not else command

    def _other_port(self, port: re.Match[str]) -> str:
        if port[3] not in self.ports:
            self.ports[port[3]] = free_port()
        return f"{port[2] or (port[1] or '') + ':'}{self.ports[port[3]]}"

    def _run(self, program: Path, block: Block) -> None:
        """Runs a program in Python, or reads it where it needs what is not here."""
        if not is_runnable(block.body):
            check_imports(block)
            return
        done = command_line.run_script(self.folder, program, [])
        assert done.code == 0, f"{block}\n{done.out}{done.err}"
        self.printed = done.out + done.err

    def _type(self, commands: list[str], block: Block) -> None:
        """Types commands into a shell; where they are ours and nothing else, into a cheaper one."""
        for command in commands:
            if command.startswith("export "):
                words = shlex.split(command, comments=True)[1:]
                self.environment |= dict(word.split("=", 1) for word in words)
        plain = not any(is_for_shell(one) for one in commands if not SERVES.match(one))
        for serves, some in groupby(commands, lambda one: bool(SERVES.match(one))):
            if serves:
                for command in some:
                    self.running.enter_context(self._serving(command))
            elif plain:
                for command in some:
                    self._type_ours(command, block)
            elif shutil.which("curl") or not any(re.search(r"\bcurl ", command) for command in commands):
                script = "\n".join(some)
                self._check(script, self._in_shell(script), block)

    def _type_ours(self, command: str, block: Block) -> None:
        words = shlex.split(command, comments=True)
        if words[0] == "treetune":
            self._check(command, self.treetune(*words[1:], **self.environment), block)
        elif words[0] == "python":
            self._check(command, self.python(self.folder / words[1], words[2:]), block)

    def _check(self, command: str, done: command_line.Result, block: Block) -> None:
        expected = int(told[1]) if (told := re.search(r"# exits with (\d+)", command)) else 0
        if "treetune sandbox check" in command and probe(shell=True).launcher is None:
            expected = 1  # which is what it says of such a machine
        assert done.code == expected, f"{block}: {command}\n{done.out}{done.err}"
        self.printed += done.out + done.err

    def _in_shell(self, command: str) -> command_line.Result:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, **self.environment},
        )
        return command_line.Result(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def _serving(self, command: str) -> Iterator[None]:
        """What goes on until the page is read: in another terminal, as it were."""
        log = self.folder / f"server-{len(os.listdir(self.folder))}.log"
        with log.open("w") as said:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                stdout=said,
                stderr=said,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        try:
            for port in LISTENS.findall(command):
                wait_for(int(port), process, log)
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0, f"{command}\n{log.read_text()}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_with(python: Path, page: Path, folder: Path, left_out: str, environment: dict[str, str]) -> None:
    """Reads a page in another virtual environment, but for the commands that a pattern tells."""
    (folder / "bin").mkdir()
    (folder / "bin" / "treetune").write_text(f'#!/bin/sh\nexec {python} -m treetune "$@"\n')
    (folder / "bin" / "treetune").chmod(0o755)
    places = [str(folder / "bin"), str(python.parent), os.environ["PATH"]]
    environment = {**environment, "PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT / "src")}

    def run(arguments: list[str], environment: dict[str, str]) -> command_line.Result:
        variables = {**os.environ, **environment}
        done = subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, env=variables)
        return command_line.Result(done.returncode, done.stdout, done.stderr)

    def treetune(*arguments: str, **environment: str) -> command_line.Result:
        return run(["-m", "treetune", *arguments], environment)

    def program(file: Path, arguments: list[str]) -> command_line.Result:
        return run([str(file), *arguments], reader.environment)

    reader = Reader(
        page, folder, treetune, environment, lambda command: left_out if re.match(left_out, command) else None, program
    )
    reader.read()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at {port}\n{log.read_text()}")


def assert_shown(shown: str, printed: str, block: Block) -> None:
    """Every line that the page shows is in what was printed, in this order."""
    rest = " ".join(printed.split())
    for line in shown.splitlines():
        parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
        found = re.search(".*?".join(parts).strip(), rest) if line.strip(" .") else None
        assert found or not line.strip(" ."), f"{block}: not printed: {line}\n{printed}"
        rest = rest[found.end() :] if found else rest


def check_imports(block: Block) -> None:
    """What a block imports from Treetune is there; what needs a trainer is looked for by its file."""
    for node in ast.walk(ast.parse(block.body)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("treetune"):
            spec = importlib.util.find_spec(str(node.module))
            assert spec, f"{block}: {node.module}"
            for alias in node.names:
                assert re.search(rf"\b{alias.name}\b", Path(str(spec.origin)).read_text()), f"{block}: {alias.name}"
