"""pydantic-ai with a tool."""

import os
import subprocess
from pathlib import Path

from pydantic_ai import Agent

agent = Agent("openai-chat:policy", instructions="You work in a shell.")


@agent.tool_plain
def shell(command: str) -> str:
    """Run a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return done.stdout + done.stderr


print(agent.run_sync(Path(os.environ["TREETUNE_TASK"]).read_text()).output)
