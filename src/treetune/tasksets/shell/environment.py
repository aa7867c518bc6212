"""OS interaction: a question about a Linux machine, or something to do on it; AgentBench's samples.

    parse(Action.of({"name": "answer_action", "arguments": {"answer": "3"}}))   # Move("answer", "3")

The policy runs scripts in a persistent shell, then answers or finishes. The reference answer is computed before the
first action, on a copy of the machine: the policy cannot change what is right, and cannot find traces of the
computation.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from treetune.chat.calls import read_arguments
from treetune.chat.message import Message, text_of
from treetune.core.contract import Contract
from treetune.core.environment import Action, Rendered, Step, show
from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.errors import EnvironmentFault
from treetune.sandbox.bubblewrap import is_passable
from treetune.sandbox.limits import Ended, Result, SandboxLimits
from treetune.sandbox.machines import Machine, share_pool
from treetune.sandbox.shell import Shell
from treetune.tasksets.shell import OUT_OF_MEMORY, SETUP_SECONDS, ShellEnvironment, list_blocks, require_machine
from treetune.tasksets.shell.sample import MATCHERS, OSSample, OSScript, matches

COMMAND_SECONDS = 30.0
SHOWN_CHARS = 800
QUOTED_CHARS = 500
SETTLE_SECONDS, SETTLE_LOOKS = 1.0, 20
MEMORY_MB, PROCESSES, DISK_MB = 512, 128, 128
PATHS = "find / -xdev ! -path '/etc/*' -print0"
NO_BYTECODE = {"PYTHONPYCACHEPREFIX": "/dev/null"}
"""Makes Python ignore previously compiled files, which may be forged."""
CHANGED_SYSTEM = "find /usr -xdev ! -type d -newerct @{} -print0"
ACT = re.compile(r"^[ \t*_#]*Act(?:ion)?\s*:[ \t*_]*(.+)$", re.I | re.M)
ANSWER = re.compile(r"answer\s*\((.*)\)\W*", re.I | re.S)


def _describe(name: str, description: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _describe("bash_action", "Run a script in the shell and see what it prints.", "script"),
    _describe("answer_action", "Give the answer to the question; the task ends.", "answer"),
    _describe("finish_action", "Say that the task is done, where it asks for no answer."),
]
"""The same actions as functions, for policies that call them."""


class OSTask(Task, frozen=True, kw_only=True):
    sample: OSSample


class OSInteractionEnvironment(ShellEnvironment):
    CONTRACT = Contract(max_turns=8, turn_discount=0.95)

    task: OSTask

    def __init__(self, task: OSTask) -> None:
        super().__init__(task)
        info = task.extra_info
        self._output_chars = int(info.get("output_chars", SHOWN_CHARS))
        self._limits = SandboxLimits(
            seconds=float(info.get("command_seconds", COMMAND_SECONDS)),
            memory_mb=int(info.get("memory_mb", MEMORY_MB)),
            processes=PROCESSES,
            disk_mb=DISK_MB,
            output_kb=256,
        )
        self._machine = Machine.of(info)
        self._setup_seconds = float(info.get("setup_seconds", SETUP_SECONDS))
        self.reference = ""
        """The output of the example before the first action."""
        self._made: set[str] = set()
        """Files that were created or changed while the task was set up."""

    @classmethod
    def render(cls, trace: Trace) -> Rendered:
        """Render the session: scripts behind `$`, what they printed, and the ending as a comment."""
        lines: list[str] = []
        for turn, replies in trace.exchanges:
            if turn.message is None:
                break
            calls = turn.message.get("tool_calls")
            move = parse(Action.of(turn.message if calls else text_of(turn.message.get("content")) or ""))
            if move.kind == "bash":
                first, *more = move.text.splitlines() or [""]
                lines += [f"$ {first}", *(f"> {line}" for line in more)]
                lines += [text for reply in replies if (text := text_of(reply.get("content")))]
            else:
                said = {"answer": f"answer: {move.text}", "finish": "finish"}
                lines.append(f"# {said.get(move.kind, f'nothing was done: {move.text}')}")
        if trace.explanation:
            lines.append(f"# {trace.explanation}")
        return Rendered("\n".join(lines), "shell")

    async def start(self) -> list[Message]:
        sample, evaluation = self.task.sample, self.task.sample.evaluation
        if sample.refusal is not None:
            remedy = "set scripts_root, or leave such samples out with --taskset.unsupported skip"
            raise EnvironmentFault(f"this sample cannot be served: {sample.refusal}", remedy=remedy)
        self._shell = await share_pool(self.widen(self._limits), self._machine).take()
        checks_state = bool(evaluation.check) and not evaluation.has_reference
        began = (await self.run(["date", "+%s.%N"])).text.strip()
        before = await self._list_paths(PATHS) if checks_state else set()
        for script in sample.init:
            _require_success("init", await self._run_script(script))
        if sample.start is not None:
            started = await self.shell.execute(sample.start.code, seconds=self._setup_seconds)
            _require_success("start", require_machine(started))
        if evaluation.has_reference:
            self.reference = await self._take_reference()
        if evaluation.runs_scripts:
            await self.shell.record_files()
        if checks_state:
            self._made = (await self._list_paths(PATHS) - before) | await self._list_paths(CHANGED_SYSTEM.format(began))
        return self.task.messages

    def problem(self) -> str:
        asks = self.task.sample.evaluation.asks
        return super().problem() + ("\n\nAnswer with the answer alone, without other words." if asks else "")

    def hand_in(self, answer: str) -> dict[str, Any]:
        return {"name": "answer_action", "arguments": {"answer": answer}} if answer else {"name": "finish_action"}

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        move = parse(action)
        if move.kind in ("answer", "finish"):
            right, why = await self._judge(move.text)
            return self._end(float(right), why, answer=move.text if move.kind == "answer" else None)
        said = f"Nothing was done: {move.text}."
        if move.kind == "bash":
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            result = await self.shell.execute(move.text, watch=lambda chunk: show(decoder.decode(chunk)))
            if result.ended is Ended.MEMORY:
                return self._end(0.0, OUT_OF_MEMORY)
            said = self.describe(result, self._limits.seconds, self._output_chars)
        if last:
            return self._end(0.0, "no answer within the turn limit", truncated=True, observation=said)
        return Step(said, info={"metrics": {"turns": self.turns}})

    async def run_example(self, shell: Shell) -> Result:
        """Run the sample's example: it prints the right answer before the first action, or does what the task asks
        for."""
        assert self.task.sample.evaluation.example is not None
        return await self._run_script(self.task.sample.evaluation.example, shell=shell)

    async def _run_script(
        self, script: OSScript, *parameters: str, shell: Shell | None = None, env: Mapping[str, str] | None = None
    ) -> Result:
        command = script.command(self._machine.python, *parameters)
        ran = (shell or self.shell).run(command, env={**NO_BYTECODE, **(env or {})}, seconds=self._setup_seconds)
        return require_machine(await ran)

    async def _take_reference(self) -> str:
        if running := await self._wait_for_processes():
            # A copy has only files. A reference that looks at processes would differ there.
            names = ", ".join(sorted({command[:60] for command in running})[:3])
            raise _invalid(f"it leaves {len(running)} processes running, which its example would not see: {names}")
        copy = await self.shell.copy()
        try:
            result = await self.run_example(copy)
        finally:
            await copy.close()
        _require_success("example", result)
        for check in self.task.sample.evaluation.check:
            if isinstance(check, str) and MATCHERS[check](result.text.strip()) is None:
                said = _quote(result)
                raise _invalid(f"what its example prints does not match {check.removesuffix('-match')}: {said}")
        return result.text

    async def _wait_for_processes(self) -> list[str]:
        """Return the commands that still run a moment after the machine was set up."""
        for _ in range(SETTLE_LOOKS):
            if not await self.shell.list_processes():
                break
            await asyncio.sleep(SETTLE_SECONDS / SETTLE_LOOKS)
        return await self.shell.list_processes()

    async def _judge(self, answer: str) -> tuple[bool, str]:
        """Return whether an answer is right, and if not why."""
        evaluation = self.task.sample.evaluation
        if evaluation.match is not None:
            return answer.strip() == evaluation.match.strip(), f"the answer should be {evaluation.match!r}"
        if evaluation.regex is not None:
            return re.search(evaluation.regex, answer) is not None, f"the answer should match {evaluation.regex!r}"
        parameters = [answer]
        for check in evaluation.check:
            if check is None:
                parameters.append(self.reference)
            elif isinstance(check, str):
                if not matches(check, answer, parameters[-1]):
                    return False, f"the answer should be {parameters[-1].strip()!r}"
            else:
                hidden, variables = check.hide()
                result = await self._run_script(hidden, *parameters, env=variables)
                if not result.ok:
                    return False, f"a check ended with {result.exit_code}: {check.code[:200]}"
                parameters.append(result.text)
        if self._made:  # some checks pass if all of it is gone
            left = await self.run(["xargs", "-0", "ls", "-d"], stdin="\0".join(self._made).encode())
            if not left.stdout.strip():
                return False, "all files that the setup created were deleted"
        # The task is about the changes of the setup.
        tampered = set(await self.shell.find_tampered()) - self._made if evaluation.runs_scripts else ()
        if tampered:
            return False, f"programs that checks rely on were changed: {', '.join(sorted(tampered)[:3])}"
        return True, "all checks passed"

    async def _list_paths(self, script: str) -> set[str]:
        return set((await self.run(["sh", "-c", script])).text.split("\0")) - {""}

    def _end(self, reward: float, why: str, **more: Any) -> Step:
        return self.end(reward, why, metrics={"turns": self.turns}, **more)


def _require_success(name: str, result: Result) -> None:
    if result.ok:
        return
    how = f"ended with {result.exit_code}" if result.ended is Ended.COMPLETED else f"was stopped ({result.ended})"
    raise _invalid(f"its {name} script {how} after {result.seconds:.1f} seconds: {_quote(result)}")


def _quote(result: Result) -> str:
    """Return the end of its output."""
    said = [text.strip()[-QUOTED_CHARS:] for text in (result.text, result.error_text)]
    return "\n".join(filter(None, said)) or "it printed nothing"


def _invalid(why: str) -> EnvironmentFault:
    remedy = "correct the sample, or leave it out; `treetune validate` lists those that do not work here"
    return EnvironmentFault(f"this sample is invalid: {why}", remedy=remedy)


class Move(msgspec.Struct, frozen=True):
    kind: Literal["bash", "answer", "finish", "invalid"]
    text: str = ""
    """The script, the answer, or the reason why nothing can be done."""


def parse(action: Action) -> Move:
    move = _parse_text(action.content) if isinstance(action.content, str) else _parse_call(action.content)
    return move if is_passable(move.text) else Move("invalid", "it has a character that no command can have")


def _parse_call(content: Any) -> Move:
    if isinstance(content, list) and content:
        return _parse_call(content[-1])
    if not isinstance(content, dict):
        return Move("invalid", "an action is text, or a function call with a name and arguments")
    if calls := content.get("tool_calls"):
        single = isinstance(calls, list) and len(calls) == 1
        return _parse_call(calls[0]) if single else Move("invalid", "call one function a turn")
    if isinstance(content.get("function"), dict):
        return _parse_call(content["function"])
    if "name" not in content and isinstance(content.get("content"), str):
        return _parse_text(content["content"])
    arguments, error = read_arguments(content.get("arguments") or {})
    if error is not None:
        return Move("invalid", "the arguments of a call are a JSON object")
    match str(content.get("name", "")).removesuffix("_action"):
        case "bash" if isinstance(arguments.get("script"), str):
            return Move("bash", arguments["script"])
        case "answer" if "answer" in arguments:
            return Move("answer", str(arguments["answer"]))
        case "finish":
            return Move("finish")
    return Move("invalid", "the functions are bash_action(script), answer_action(answer) and finish_action()")


def _parse_text(text: str) -> Move:
    acts = ACT.findall(text)
    blocks = list_blocks(text)
    if len(acts) > 1 or len(blocks) > 1:
        return Move("invalid", "do one thing a turn")
    act = acts[0].strip() if acts else ""
    kind = re.sub(r"\W.*", "", act, flags=re.S).casefold()
    if kind == "answer":
        # An answer may have several lines.
        found = ANSWER.fullmatch(text[text.index(acts[0]) :].strip()) or ANSWER.fullmatch(act)
        return Move("answer", found[1].strip().strip("\"'")) if found else Move("invalid", "write Act: answer(...)")
    if kind == "finish":
        return Move("finish")
    if blocks and kind in ("", "bash"):
        return Move("bash", blocks[0])
    return Move("invalid", "say Act: bash with a block that begins with ```bash, Act: answer(...), or Act: finish")
