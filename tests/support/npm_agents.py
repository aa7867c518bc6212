"""Public agents that are npm packages, with a node that is recent enough for them.

    folder = install()                      # for PATH: claude, codex, gemini, node, opencode, qwen
    python -m tests.support.npm_agents      # builds it

Installed once, beside the environments of `venvs`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

from tests.support.venvs import CACHE

PACKAGES = [
    "node@22.23.3", "@anthropic-ai/claude-code@2.1.328", "@google/gemini-cli@0.61.0", "@openai/codex@0.169.0",
    "@qwen-code/qwen-code@0.24.4", "opencode-ai@1.18.33",
]  # fmt: skip


def install() -> Path:
    """The folder of their programs."""
    place = CACHE / f"npm-agents-{hashlib.sha256(repr(PACKAGES).encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / "finished").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            command = ["npm", "install", "--prefix", place, "--no-fund", "--no-audit", *PACKAGES]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"npm install failed:\n{done.stderr[-3000:]}")
            (place / "finished").touch()
    return place / "node_modules" / ".bin"


if __name__ == "__main__":
    print(install())
