"""LangGraph's ready agent around LangChain's model."""

import os
import subprocess
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def shell(command: str) -> str:
    """Run a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return done.stdout + done.stderr


agent = create_react_agent(ChatOpenAI(model="policy"), [shell], prompt="You work in a shell.")
result = agent.invoke({"messages": [("user", Path(os.environ["TREETUNE_TASK"]).read_text())]})
print(result["messages"][-1].content)
