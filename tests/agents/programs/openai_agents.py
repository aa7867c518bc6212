"""openai-agents: an agent that asks another one, which is its tool. Responses, streamed."""

import asyncio
import os
import subprocess
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def shell(command: str) -> str:
    """Run a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return done.stdout + done.stderr


async def main() -> None:
    set_tracing_disabled(True)
    worker = Agent(name="worker", instructions="Work in the shell.", tools=[shell], model="policy")
    delegate = worker.as_tool(tool_name="ask_worker", tool_description="Hands a task to a worker.")
    chief = Agent(name="chief", instructions="Ask the worker, then answer.", tools=[delegate], model="policy")
    result = Runner.run_streamed(chief, Path(os.environ["TREETUNE_TASK"]).read_text())
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
