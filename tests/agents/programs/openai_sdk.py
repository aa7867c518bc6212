"""An agent around OpenAI's SDK: `openai_sdk.py [--stream]`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

client = OpenAI()
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS, "strict": True}
asked = {"model": "policy", "tools": [{"type": "function", "function": SHELL}]}
messages = [{"role": "user", "content": Path(os.environ["TREETUNE_TASK"]).read_text()}]


def complete():
    if "--stream" not in sys.argv:
        return client.chat.completions.create(messages=messages, **asked).choices[0].message
    with client.chat.completions.stream(messages=messages, **asked) as events:
        return events.get_final_completion().choices[0].message


while calls := (message := complete()).tool_calls:
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in calls:
        command = json.loads(call.function.arguments)["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": done.stdout + done.stderr})
print(message.content)
