"""Files to a dataset repository of the hub, with the card that says what they are.

    card = Card("Sums", {"train": ["data/train-00000-of-00001.parquet"]}, "Tasks for ...")
    upload("me/sums", {"README.md": card.page(), "data/train-00000-of-00001.parquet": path})

By huggingface_hub's own client: it finds the token (HF_TOKEN, `hf auth login`) and the hub (HF_ENDPOINT).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from treetune.errors import NetworkError, TreetuneError, UsageError, described
from treetune.rows.loading import hub_problem

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


class Card(msgspec.Struct, frozen=True):
    """The README of a dataset: `load_dataset` reads from it which files are which split."""

    title: str
    splits: Mapping[str, Sequence[str]]
    text: str
    """What it is, how it is scored, how it was made: markdown."""

    def page(self) -> bytes:
        files = [{"split": split, "path": list(paths)} for split, paths in self.splits.items()]
        about = {"tags": ["treetune"], "configs": [{"config_name": "default", "data_files": files}]}
        head = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
        return f"---\n{head}---\n\n# {' '.join(self.title.split())}\n\n{self.text.strip()}\n".encode()


def check_repo(repo: str) -> str:
    """The token for a repository; refused before anything is built or read."""
    from huggingface_hub import get_token

    if not _REPO.fullmatch(repo):
        raise UsageError(f"{repo!r} names no repository of the hub", remedy="write user/name, or organisation/name")
    if (token := get_token()) is None:
        remedy = "log in with `hf auth login`, or export HF_TOKEN=... (a token that may write)"
        raise UsageError("the hub wants a token, and there is none", remedy=remedy)
    return token


def upload(repo: str, files: Mapping[str, Path | bytes], *, private: bool = False, message: str = "") -> str:
    """Adds files to a dataset repository, which is made where there is none, in one commit; gives its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    token = check_repo(repo)
    if (problem := hub_problem(constants.ENDPOINT)) is not None:
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
                f"the hub does not let this token write to {repo} (status {status})",
                remedy="use a token that may write, and a user or organisation of yours",
            ) from None
        raise TreetuneError(f"the hub refused {repo}: {error}") from error
    except (OSError, ValueError) as error:
        raise TreetuneError(f"{repo} could not be pushed: {described(error)}") from error
    return str(url) if "://" in str(url) else f"{constants.ENDPOINT}/datasets/{repo}"
