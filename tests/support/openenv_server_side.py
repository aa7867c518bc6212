"""OpenEnv's own server with the echo environment of its own template: openenv_server_side.py PORT SESSIONS FOLDER.

Run with the Python of `venv(*OPENENV)`. The environment may end an episode, and fail, where it is told to: the template
does neither.
"""

import sys
from pathlib import Path

import openenv.cli.templates
import uvicorn

port, sessions, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
names = {"__ENV_NAME__": "echo", "__ENV_TITLE_NAME__": "Echo", "__ENV_CLASS_NAME__": "Echo"}
template = Path(openenv.cli.templates.__file__).parent / "openenv_env"
for file in template.rglob("*.py"):
    text, name = file.read_text(), str(file.relative_to(template))
    for mark, value in names.items():
        text, name = text.replace(mark, value), name.replace(mark, value)
    if name == "server/app.py":
        text = text.replace("max_concurrent_envs=1", f"max_concurrent_envs={sessions}")
    (folder / "echo" / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "echo" / name).write_text(text)
sys.path.insert(0, str(folder))
from echo.server import app as served  # noqa: E402
from echo.server.echo_environment import EchoEnvironment  # noqa: E402

echo = EchoEnvironment.step


def step(self, action):
    if action.message == "fail":
        raise RuntimeError("the machine is gone")
    observation = echo(self, action)
    observation.done = action.message.startswith("end")
    return observation


EchoEnvironment.step = step
uvicorn.run(served.app, host="127.0.0.1", port=port, log_level="warning")
