"""An MCP server in a few lines, which starts at once and misbehaves as its arguments say: garbage, silent, crash,
stubborn, child."""

import json
import os
import signal
import subprocess
import sys
import time

ways = sys.argv[1:]
pids = os.environ.get("PIDS")
"""A folder in which each process leaves a file of its name."""


def leave(pid: int) -> None:
    if pids:
        open(os.path.join(pids, str(pid)), "w").close()


def send(id: object, **answer: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", "id": id, **answer}), flush=True)


def run(name: str, arguments: dict) -> dict:
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hang":
        time.sleep(600)
    text = "x" * arguments["size"] if name == "big" else str(arguments.get("text", ""))
    return {"content": [{"type": "text", "text": text}], "isError": name == "wrong"}


def schema(name: str) -> dict:
    kinds = {"big": {"size": {"type": "integer"}}}
    return {
        "name": name,
        "inputSchema": {"type": "object", "properties": kinds.get(name, {"text": {"type": "string"}})},
    }


leave(os.getpid())
if "crash" in ways:
    print("no database at 10.0.0.1", file=sys.stderr)
    sys.exit(3)
if "stubborn" in ways:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in ways:
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    leave(subprocess.Popen([sys.executable, "-I", "-c", sleeper], stdin=subprocess.DEVNULL).pid)
names = os.environ.get("TOOLS", "echo big wrong die hang").split()
for line in sys.stdin:
    if "silent" in ways:
        continue
    if "garbage" in ways:
        print("Listening ...\n{\n\x00\ufffd", flush=True)
        sys.stdout.buffer.write(b"\xff\xfe\n[1, 2]\n")
        sys.stdout.flush()
    asked = json.loads(line)
    params = asked.get("params") or {}
    if asked["method"] == "initialize":
        about = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        send(asked["id"], result={**about, "serverInfo": {"name": "plain", "version": "1"}})
    elif asked["method"] == "tools/list":
        send(asked["id"], result={"tools": [schema(name) for name in names]})
    elif asked["method"] == "tools/call":
        send(asked["id"], result=run(params["name"], params.get("arguments") or {}))
if "stubborn" in ways:
    time.sleep(600)
