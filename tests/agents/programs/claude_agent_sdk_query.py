"""claude-agent-sdk: the Claude Code that is in its wheel."""

import asyncio
import os
from pathlib import Path

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def main() -> None:
    options = ClaudeAgentOptions(model="policy", allowed_tools=["Bash"], permission_mode="bypassPermissions")
    async for message in query(prompt=Path(os.environ["TREETUNE_TASK"]).read_text(), options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())
