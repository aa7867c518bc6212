"""The Hugging Face hub: whether it answers, and models of it, brought here.

folder = fetch_model("Qwen/Qwen3-0.6B")      # from the cache of huggingface_hub where the hub cannot be reached
"""

from __future__ import annotations

import re
from pathlib import Path

from treetune.errors import NetworkError, UsageError

WAIT = 5.0
"""Seconds for an answer of the hub's."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def is_hub_name(name: str) -> bool:
    """Whether it could be `ORG/NAME` on the hub."""
    return _NAME.fullmatch(name) is not None


def find_problem(endpoint: str | None = None) -> str | None:
    """Why the hub, or this address, does not answer; None where it does."""
    from huggingface_hub import constants, get_session

    endpoint = endpoint or constants.ENDPOINT
    try:
        status = get_session().head(endpoint, timeout=WAIT).status_code
    except Exception as error:
        return f"{endpoint}: {str(error) or type(error).__name__}"
    return f"{endpoint} answers with status {status}" if status >= 500 else None


def fetch_model(name: str) -> Path:
    """The folder of a model of the hub's; what is not here yet is downloaded."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else find_problem()
    if problem is not None:
        try:
            return Path(snapshot_download(name, allow_patterns=[*_FILES, "*.safetensors"], local_files_only=True))
        except LocalEntryNotFoundError:
            remedy = "check the network, a proxy (HTTPS_PROXY) or HF_ENDPOINT; or name a folder with the model"
            problem = f"no model at {name}, nor in the hub's cache here, and the hub cannot be reached: {problem}"
            raise NetworkError(problem, remedy=remedy) from None
    try:
        files = [file.rfilename for file in HfApi().model_info(name).siblings or []]
        # Weights as pickles are taken only where there are no others.
        weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
        return Path(snapshot_download(name, allow_patterns=[*_FILES, weights]))
    except GatedRepoError:
        remedy = f"accept its terms at https://huggingface.co/{name}, then set HF_TOKEN"
        raise UsageError(f"the model {name} is gated", remedy=remedy) from None
    except RepositoryNotFoundError:
        remedy = "correct the name, or name a folder or a .gguf file; a private one needs HF_TOKEN"
        raise UsageError(f"no model at {name}, and none on the hub", remedy=remedy) from None
