"""The Hugging Face hub: availability, model downloads, and file uploads.

    folder = fetch_model("Qwen/Qwen3-0.6B")      # from the cache of huggingface_hub if the hub cannot be reached
    card = Card("Sums", {"train": ["data/train-00000-of-00001.parquet"]}, "Tasks for ...")
    upload("me/sums", {"README.md": card.page(), "data/train-00000-of-00001.parquet": path})

Uses huggingface_hub's client, which finds the token (HF_TOKEN, `hf auth login`) and the hub (HF_ENDPOINT).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from treetune.errors import NetworkError, TreetuneError, UsageError, format_error

WAIT = 5.0
"""The timeout for the hub in seconds."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def is_hub_name(name: str) -> bool:
    """Whether it could be `ORG/NAME` on the hub."""
    return _NAME.fullmatch(name) is not None


def find_problem(endpoint: str | None = None) -> str | None:
    """Why the hub, or this address, does not answer; None if it does."""
    from huggingface_hub import constants, get_session

    endpoint = endpoint or constants.ENDPOINT
    try:
        status = get_session().head(endpoint, timeout=WAIT).status_code
    except Exception as error:
        return f"{endpoint}: {str(error) or type(error).__name__}"
    return f"{endpoint} answers with status {status}" if status >= 500 else None


@contextmanager
def offline_where_unreachable() -> Iterator[str | None]:
    """Yield why the hub cannot be reached, or None. If it cannot, the library is offline inside the block and uses its
    cache; otherwise it would retry for most of a minute."""
    from huggingface_hub import constants

    import datasets

    problem = None if datasets.config.HF_HUB_OFFLINE else find_problem()
    if problem is None:
        yield None
        return
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False


def fetch_model(name: str) -> Path:
    """The local folder of a model on the hub. Missing files are downloaded."""
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
        # Download pickled weights only if there are no others.
        weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
        return Path(snapshot_download(name, allow_patterns=[*_FILES, weights]))
    except GatedRepoError:
        remedy = f"accept its terms at https://huggingface.co/{name}, then set HF_TOKEN"
        raise UsageError(f"the model {name} is gated", remedy=remedy) from None
    except RepositoryNotFoundError:
        remedy = "correct the name, or name a folder or a .gguf file; a private one needs HF_TOKEN"
        raise UsageError(f"no model at {name}, and none on the hub", remedy=remedy) from None


# Datasets


class Card(msgspec.Struct, frozen=True):
    """The README of a dataset. `load_dataset` reads the files of each split from it."""

    title: str
    splits: Mapping[str, Sequence[str]]
    text: str
    """A description in markdown: what it is, how it is scored, how it was made."""

    def page(self) -> bytes:
        files = [{"split": split, "path": list(paths)} for split, paths in self.splits.items()]
        about = {"tags": ["treetune"], "configs": [{"config_name": "default", "data_files": files}]}
        import yaml

        head = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
        return f"---\n{head}---\n\n# {' '.join(self.title.split())}\n\n{self.text.strip()}\n".encode()


def check_repo(repo: str) -> str:
    """The token for a repository. Raises if there is none, before anything is built or read."""
    from huggingface_hub import get_token

    if not is_hub_name(repo):
        raise UsageError(
            f"{repo!r} is not the name of a repository on the hub", remedy="write user/name, or organisation/name"
        )
    if (token := get_token()) is None:
        remedy = "log in with `hf auth login`, or export HF_TOKEN=... (a token with write access)"
        raise UsageError("no Hugging Face token found", remedy=remedy)
    return token


def upload(repo: str, files: Mapping[str, Path | bytes], *, private: bool = False, message: str = "") -> str:
    """Add files to a dataset repository in one commit, and create the repository if needed; return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    token = check_repo(repo)
    if (problem := find_problem()) is not None:
        raise NetworkError(f"the hub cannot be reached: {problem}", remedy="check the network, and HF_ENDPOINT")
    api = HfApi(token=token)
    operations = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    try:
        url = api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        api.create_commit(repo, operations, commit_message=message or "Files of Treetune", repo_type="dataset")
    except OfflineModeIsEnabled:
        raise NetworkError("HF_HUB_OFFLINE is set", remedy="unset it to push") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UsageError(
                f"this token may not write to {repo} on the hub (status {status})",
                remedy="use a token with write access, and your own user or organisation",
            ) from None
        raise TreetuneError(f"the hub refused {repo}: {error}") from error
    except (OSError, ValueError) as error:
        raise TreetuneError(f"{repo} could not be pushed: {format_error(error)}") from error
    return str(url) if "://" in str(url) else f"{constants.ENDPOINT}/datasets/{repo}"
