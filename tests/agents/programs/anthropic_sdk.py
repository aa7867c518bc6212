"""An agent around Anthropic's SDK: `anthropic_sdk.py [--stream]`."""

import os
import subprocess
import sys
from pathlib import Path

from anthropic import Anthropic

client = Anthropic()
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"name": "shell", "description": "Run a command.", "input_schema": SCHEMA}
asked = {"model": "policy", "max_tokens": 2000, "system": "You work in a shell.", "tools": [SHELL]}
messages = [{"role": "user", "content": Path(os.environ["TREETUNE_TASK"]).read_text()}]


def complete():
    if "--stream" not in sys.argv:
        return client.messages.create(messages=messages, **asked)
    with client.messages.stream(messages=messages, **asked) as events:
        return events.get_final_message()


def run(use):
    done = subprocess.run(use.input["command"], shell=True, capture_output=True, text=True)
    return {"type": "tool_result", "tool_use_id": use.id, "content": done.stdout + done.stderr}


while (message := complete()).stop_reason == "tool_use":
    messages.append({"role": "assistant", "content": message.content})
    messages.append({"role": "user", "content": [run(block) for block in message.content if block.type == "tool_use"]})
print("".join(block.text for block in message.content if block.type == "text"))
