"""OS interaction: a question about a Linux machine, or something to do on it; AgentBench's samples.

    parse(Action.of("Think: look.\\n\\nAct: bash\\n\\n```bash\\nls\\n```"))    # BashAction("ls")
    parse(Action.of({"name": "answer_action", "arguments": {"answer": "3"}}))   # AnswerAction("3")

The policy runs scripts in a shell that lives on, then answers or finishes: in AgentBench's text form, by its function
calls, or with one block of code alone. The reference answer is taken before its first action: what the policy does to
the machine afterwards cannot change what is right.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import msgspec

from treetune.builtin.harbor.environment import list_blocks
from treetune.builtin.shell.sample import MATCHERS, Sample, Script, problem_with_reference
from treetune.builtin.turns import max_turns_of
from treetune.environment import Action, Environment, Step, show
from treetune.errors import EnvironmentFault
from treetune.sandbox.launcher import is_passable
from treetune.sandbox.limits import Ended, Result, SandboxLimits
from treetune.sandbox.shell import Machine, Shell, ShellResult, share_pool
from treetune.task import Message, Task

MAX_TURNS = 8
COMMAND_SECONDS = 30.0
SETUP_SECONDS = 60.0
OUTPUT_CHARS = 800
MEMORY_MB, PROCESSES, DISK_MB = 512, 128, 128
PATHS = "find / -xdev ! -path '/etc/*' -print0"
NO_BYTECODE = {"PYTHONPYCACHEPREFIX": "/dev/null"}
"""What Python compiled before is not used: it may be forged."""
CHANGED_SYSTEM = "find /usr -xdev ! -type d -newerct @{} -print0"
ACT = re.compile(r"^[ \t*_#]*Act(?:ion)?\s*:[ \t*_]*(.+)$", re.I | re.M)
ANSWER = re.compile(r"answer\s*\((.*)\)\W*", re.I | re.S)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}} if argument else {},
                "required": [argument] if argument else [],
            },
        },
    }
    for name, description, argument in (
        ("bash_action", "Run a script in the shell and see what it prints.", "script"),
        ("answer_action", "Give the answer to the question; the task ends.", "answer"),
        ("finish_action", "Say that the task is done, where it asks for no answer.", ""),
    )
]
"""The same actions as functions, for policies that call them."""


class OSTask(Task, frozen=True, kw_only=True):
    sample: Sample


class OSInteractionEnvironment(Environment):
    MULTI_TURN = True

    task: OSTask

    def __init__(self, task: OSTask) -> None:
        super().__init__(task)
        info = task.extra_info
        self._max_turns = max_turns_of(task, MAX_TURNS)
        self._output_chars = int(info.get("output_chars", OUTPUT_CHARS))
        self._limits = SandboxLimits(
            seconds=float(info.get("command_seconds", COMMAND_SECONDS)),
            memory_mb=int(info.get("memory_mb", MEMORY_MB)),
            processes=PROCESSES,
            disk_mb=DISK_MB,
            output_kb=256,
        )
        self._machine = Machine(rootfs=info.get("rootfs"), image=info.get("image"))
        self._turns = 0
        self._shell: Shell | None = None
        self._reference: str | None = None
        self._made: set[str] = set()
        """Files that were made or changed for the task."""

    async def start(self) -> list[Message]:
        sample = self.task.sample
        if sample.refusal is not None:
            raise EnvironmentFault(
                f"this sample cannot be served: {sample.refusal}",
                remedy="set scripts_root, or leave such samples out with --taskset.unsupported skip",
            )
        self._shell = await share_pool(self._limits, self._machine).take()
        checks_state = bool(sample.evaluation.check) and not sample.evaluation.has_reference
        began = (await self._shell.run(["date", "+%s.%N"])).text.strip()
        before = await self._list_paths(PATHS) if checks_state else set()
        for script in sample.init:
            await self._run(script, seconds=SETUP_SECONDS)
        if sample.start is not None:
            await self._shell.execute(sample.start.code, seconds=SETUP_SECONDS)
        if sample.evaluation.has_reference:
            self._reference = await self._take_reference()
        if sample.evaluation.runs_scripts:
            await self._shell.record_files()
        if checks_state:
            self._made = (await self._list_paths(PATHS) - before) | await self._list_paths(CHANGED_SYSTEM.format(began))
        return self.task.messages

    async def step(self, action: Action) -> Step:
        self._turns += 1
        move = parse(action)
        if isinstance(move, AnswerAction | FinishAction):
            answer = move.text if isinstance(move, AnswerAction) else None
            right, why = await self._is_right(answer or "")
            return self._end(float(right), why, answer=answer)
        said = f"Nothing was done: {move.why}." if isinstance(move, InvalidAction) else await self._execute(move)
        if said is None:
            return self._end(0.0, "it took more memory than there is, and ended the machine")
        if self._turns >= self._max_turns:
            return self._end(0.0, "no answer within the turns there are", truncated=True, said=said)
        return Step(said, info={"metrics": {"turns": self._turns}})

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()

    async def run_example(self) -> str:
        """What the sample's example prints before the first action: the right answer. It may do what is asked for."""
        if self._reference is not None:
            return self._reference
        example = self.task.sample.evaluation.example
        return (await self._run(example, seconds=SETUP_SECONDS)).text if example is not None else ""

    async def _execute(self, move: BashAction) -> str | None:
        """What the script printed, as the policy sees it; None where it ended the machine."""
        assert self._shell is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        result = await self._shell.execute(move.script, watch=lambda chunk: show(decoder.decode(chunk)))
        if result.ended is Ended.MEMORY:
            return None
        self._refuse_dead(result)
        return format_result(result, self._limits.seconds, self._output_chars)

    async def _run(self, script: Script, *parameters: str, seconds: float) -> Result:
        assert self._shell is not None
        command = script.command(self._machine.python, *parameters)
        result = await self._shell.run(command, seconds=seconds, env=NO_BYTECODE)
        self._refuse_dead(result)
        return result

    async def _take_reference(self) -> str:
        example = self.task.sample.evaluation.example
        assert example is not None
        result = await self._run(example, seconds=SETUP_SECONDS)
        problem = None if result.ok else f"is not to be had: its script ended with {result.exit_code}"
        for check in self.task.sample.evaluation.check:
            if isinstance(check, str):
                problem = problem or problem_with_reference(check, result.text)
        if problem is not None:
            raise EnvironmentFault(
                f"the reference answer {problem} ({result.text[-200:]!r} {result.error_text[-200:]!r})",
                remedy="leave the sample out; `treetune validate` tells which do not work here",
            )
        return result.text

    async def _is_right(self, answer: str) -> tuple[bool, str]:
        evaluation = self.task.sample.evaluation
        if evaluation.match is not None:
            return answer.strip() == evaluation.match.strip(), f"the answer should be {evaluation.match!r}"
        if evaluation.regex is not None:
            return re.search(evaluation.regex, answer) is not None, f"the answer should match {evaluation.regex!r}"
        parameters = [answer]
        for check in evaluation.check:
            if check is None:
                parameters.append(self._reference or "")
            elif isinstance(check, str):
                if not MATCHERS[check](answer, parameters[-1]):
                    return False, f"the answer should be {parameters[-1].strip()!r}"
            else:
                result = await self._run(check, *parameters, seconds=SETUP_SECONDS)
                if not result.ok:
                    return False, f"a check ended with {result.exit_code}: {check.code[:200]}"
                parameters.append(result.text)
        if await self._all_deleted():
            return False, "what the task is about was deleted"
        if tampered := await self._find_tampering():
            return False, f"programs that checks rely on were changed: {', '.join(tampered[:3])}"
        return True, "all checks passed"

    async def _list_paths(self, script: str) -> set[str]:
        assert self._shell is not None
        found = await self._shell.run(["sh", "-c", script], seconds=SETUP_SECONDS)
        return {path for path in found.text.split("\0") if path}

    async def _all_deleted(self) -> bool:
        """Whether nothing is left of the files that were made or changed for the task. Some checks are content then."""
        if not self._made or self._shell is None:
            return False
        listing = "\0".join(self._made).encode()
        left = await self._shell.run(["xargs", "-0", "ls", "-d"], stdin=listing, seconds=SETUP_SECONDS)
        return not left.stdout.strip()

    async def _find_tampering(self) -> list[str]:
        """What was done to the system's own programs, with which the checks were made. What the task itself changed
        there is what it is about."""
        assert self._shell is not None
        if not self.task.sample.evaluation.runs_scripts:
            return []
        return [path for path in await self._shell.find_tampered() if path not in self._made]

    def _end(self, reward: float, why: str, *, truncated: bool = False, said: str = "", answer: Any = None) -> Step:
        info: dict[str, Any] = {
            "explanation": why,
            "success": reward > 0,
            "metrics": {"turns": self._turns},
            **({"answer": answer} if answer is not None else {}),
        }
        return Step(said, reward=reward, done=True, truncated=truncated, info=info)

    def _refuse_dead(self, result: ShellResult | Result) -> None:
        if result.ended is Ended.KILLED:
            raise EnvironmentFault("the sandbox was ended by something outside", remedy="run the episode again")


def write_prompt(sample: Sample, max_turns: int, command_seconds: float) -> list[Message]:
    """How the policy is told what to do."""
    rules = (
        "You are an assistant that acts on a Linux machine as a person at its shell would. You are asked a question "
        "about it, or to do something on it. In each turn think, then do exactly one of three things.\n\n"
        "Run a script; you are shown what it prints:\n\nThink: I should look around.\n\nAct: bash\n\n"
        "```bash\nls -la\n```\n\nGive the answer, and nothing but the answer, in the parentheses:\n\n"
        "Think: I have found it.\n\nAct: answer(42)\n\n"
        "Or, where nothing was asked but to do something, say that it is done:\n\nThink: It is done.\n\nAct: finish\n\n"
        "The shell lives on from turn to turn. It reads nothing from you while a script runs, and a script may take "
        f"{command_seconds:g} seconds. You have {max_turns} turns."
    )
    return [{"role": "system", "content": rules}, {"role": "user", "content": sample.description}]


def format_result(result: ShellResult, seconds: float, chars: int) -> str:
    """A result as the policy sees it."""
    text = result.text.strip("\r\n")
    if len(text) > chars:
        half = chars // 2
        text = f"{text[:half]}\n[... {len(text) + result.omitted - 2 * half} characters left out ...]\n{text[-half:]}"
    notes = [f"stopped after {seconds:g} seconds"] if result.ended is Ended.TIMEOUT else []
    notes += ["the shell was started anew"] if result.restarted else []
    notes += ["no output"] if not text and not notes else []
    return text + (("\n" if text else "") + f"({'; '.join(notes)})" if notes else "")


class BashAction(msgspec.Struct, frozen=True):
    script: str


class AnswerAction(msgspec.Struct, frozen=True):
    text: str


class FinishAction(msgspec.Struct, frozen=True):
    pass


class InvalidAction(msgspec.Struct, frozen=True):
    """Nothing that could be done."""

    why: str


Move = BashAction | AnswerAction | FinishAction | InvalidAction


def parse(action: Action) -> Move:
    move = _parse_text(action.content) if isinstance(action.content, str) else _parse_call(action.content)
    said = move.script if isinstance(move, BashAction) else move.text if isinstance(move, AnswerAction) else ""
    return move if is_passable(said) else InvalidAction("it has a character that no command can have")


def _parse_call(content: Any) -> Move:
    if isinstance(content, list) and content:
        return _parse_call(content[-1])
    if not isinstance(content, dict):
        return InvalidAction("an action is text, or a function call with a name and arguments")
    if calls := content.get("tool_calls"):
        return (
            _parse_call(calls[0])
            if isinstance(calls, list) and len(calls) == 1
            else InvalidAction("call one function a turn")
        )
    if isinstance(content.get("function"), dict):
        return _parse_call(content["function"])
    if "name" not in content and isinstance(content.get("content"), str):
        return _parse_text(content["content"])
    arguments = content.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = None
    if not isinstance(arguments, dict):
        return InvalidAction("the arguments of a call are a JSON object")
    match str(content.get("name", "")).removesuffix("_action"):
        case "bash" if isinstance(arguments.get("script"), str):
            return BashAction(arguments["script"])
        case "answer" if "answer" in arguments:
            return AnswerAction(str(arguments["answer"]))
        case "finish":
            return FinishAction()
    return InvalidAction("the functions are bash_action(script), answer_action(answer) and finish_action()")


def _parse_text(text: str) -> Move:
    acts = ACT.findall(text)
    blocks = list_blocks(text)
    if len(acts) > 1 or len(blocks) > 1:
        return InvalidAction("do one thing a turn")
    act = acts[0].strip() if acts else ""
    kind = re.sub(r"\W.*", "", act, flags=re.S).casefold()
    if kind == "answer":
        # An answer may have several lines.
        whole = text[text.index(acts[0]) :].strip()
        found = ANSWER.fullmatch(whole) or ANSWER.fullmatch(act)
        if found is None:
            return InvalidAction("write the answer as Act: answer(...)")
        return AnswerAction(found[1].strip().strip("\"'"))
    if kind == "finish":
        return FinishAction()
    if blocks and kind in ("", "bash"):
        return BashAction(blocks[0])
    return InvalidAction("say Act: bash with a block that begins with ```bash, Act: answer(...), or Act: finish")
