"""Questions answered with a search and with Python: a tool each turn, then `<solution>#### number</solution>`.

    Task(prompt="...", env_class="searchcode", reward_spec={"ground_truth": "42"}, extra_info={"corpus": "wiki.jsonl"})

A turn may hold `<tool><search>query</search></tool>` (what is searched: see `searcher`) or
`<tool><python>print(6 * 7)</python></tool>`, which runs in a sandbox without packages and is shown what it printed. The
solution, or the last of `max_turns` turns, ends it: the first `#### number` of all turns earns 1 if it is the ground
truth, compared as in `gsm8k`.

Differences from skyrl-gym 0.4.0: those of `gsm8k`, and
- Python runs in a sandbox, on 512 MB, and what it prints is cut at 9,000 characters; there it is whatever `python` is
  in the PATH, without any limit but the clock.
- what a tool answered is not looked through for the number; there a program that prints one is rewarded.
- an unreachable retriever costs 16 seconds a step at the most, not 45 and more; `search_failures` counts it.
- `max_turns` stands in `extra_info`.
"""

from __future__ import annotations

import re

from treetune.builtin.code.python import MAIN, run_python, sandbox_required
from treetune.builtin.conversation import Conversation, between, truth_texts
from treetune.builtin.math.gsm8k import final_number, gold_number
from treetune.builtin.search.searcher import Searcher
from treetune.contract import Contract, Kind, Stored
from treetune.environment import Action, Step
from treetune.sandbox import Ended, Result, SandboxLimits
from treetune.task import Message, Task

SECONDS = 10.0
"""How long a program may run."""
SHOWN_CHARACTERS = 9000

_TAG = re.compile(r"<(\w+)>")
_CLOSED = re.compile(r"</(\w+)>")


class SearchCodeEnvironment(Conversation):
    CONTRACT = Contract(
        about="Questions answered after searching a corpus and running Python",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        pattern=r"-?[0-9.]+",
        max_turns=2,
        sandbox=True,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        number = gold_number(cls.CONTRACT, task)
        return number and f"<solution>{number}</solution>"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._truths = truth_texts(task.ground_truth)
        self._said: list[str] = []
        self._searcher = Searcher(task)
        self._programs = self._failed = 0

    async def start(self) -> list[Message]:
        await sandbox_required()
        return self.task.messages

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        text = action.text
        self._said.append(text)
        solved = "<solution>" in text and "</solution>" in text
        if solved or last:
            return self._judge(truncated=not solved)
        return Step(await self._use_tool(text))

    async def close(self) -> None:
        await self._searcher.close()

    async def _use_tool(self, text: str) -> str:
        block = next(between(text, "tool"), None)
        if block is None:
            return "No <tool>...</tool> block found in action string."
        tool, given = tool_in(block.strip())
        if tool == "search":
            return await self._searcher.results(given)
        if tool == "python":
            return await self._run(given)
        if tool is None:
            return "No valid inner tool tag found inside <tool> block."
        return f"Tool '{tool[:100]}' not found in any registered tool group."

    async def _run(self, code: str) -> str:
        self._programs += 1
        files = {MAIN: code.encode("utf-8", "surrogatepass")}
        result = await run_python(files, limits=SandboxLimits(seconds=SECONDS))
        self._failed += not result.ok
        return shown(result)

    def _judge(self, truncated: bool) -> Step:
        answer = final_number("\n".join(self._said))
        right = answer in self._truths
        wrong = "no `#### number`" if answer is None else f"expected {self._truths[-1]}"
        return Step(
            reward=float(right),
            done=True,
            truncated=truncated,
            info={
                "answer": answer,
                "explanation": "right" if right else wrong,
                "success": right,
                "metrics": {
                    "turns": self.turns,
                    **self._searcher.metrics,
                    "programs": self._programs,
                    "program_failures": self._failed,
                },
            },
        )


def tool_in(block: str) -> tuple[str | None, str]:
    """The first tag that is closed again, and what it holds; a pattern would be quadratic in open tags."""
    last = {closed[1]: closed.start() for closed in _CLOSED.finditer(block)}
    for tag in _TAG.finditer(block):
        name = tag[1]
        if last.get(name, -1) >= tag.end():
            return name, block[tag.end() : block.index(f"</{name}>", tag.end())].strip()
    return None, ""


def shown(result: Result) -> str:
    """What a program's author may read of its run."""
    limits = {
        Ended.TIMEOUT: f"Execution timed out after {SECONDS} seconds.",
        Ended.MEMORY: "It used too much memory.",
        Ended.OUTPUT: "It printed too much.",
    }
    failed = limits.get(result.ended) or result.error_text.strip()
    text = f"Error executing Python code: {failed}" if failed else result.text.strip()
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]}\n...\n{text[-SHOWN_CHARACTERS // 2 :]}"
    return text
