"""A real MCP server, of the SDK's own, over standard input and output, or at a port: `sdk_server.py PORT`."""

import base64
import json
import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
server = MCPServer("shelf", log_level="ERROR")
shelf: dict[str, int] = {}


@server.tool()
def put(item: str, count: int = 1) -> str:
    """Puts items on the shelf."""
    shelf[item] = shelf.get(item, 0) + count
    return f"{shelf[item]} {item}"


@server.tool()
def look() -> dict[str, int]:
    """What is on the shelf."""
    return shelf


@server.tool()
def photo():
    """A picture of the shelf."""
    return ["the shelf:", Image(data=PNG, format="png")]


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("the shelf is locked")


@server.tool()
def variables() -> str:
    """The names of the variables that this process has."""
    return json.dumps(sorted(os.environ))


@server.tool()
def whoami() -> str:
    """The id of this process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """Ends this process as a crash does."""
    os.kill(os.getpid(), 9)
    return "never"


@server.tool()
def hang() -> str:
    """Does not come back."""
    time.sleep(600)
    return "never"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
