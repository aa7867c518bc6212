"""A tokenizer by its name or folder, and what identifies what it does.

    tokenizer = load_tokenizer("Qwen/Qwen3-8B")
    tokenizer_digest(tokenizer, {"enable_thinking": False})

Nothing here imports transformers until a tokenizer has to be loaded: a user hands over an object of any library.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from treetune.errors import MissingExtraError, UsageError
from treetune.task import digest

_LIBRARY = "transformers.tokenization_utils"
"""The modules of transformers' own tokenizer classes; those of single models are elsewhere."""


def load_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of transformers by its name, its folder or a .gguf file; any other object is one already."""
    if not isinstance(tokenizer, str | Path):
        if not callable(getattr(tokenizer, "apply_chat_template", None)):
            raise UsageError(
                f"a {type(tokenizer).__name__} is no tokenizer that applies a chat template",
                remedy="give a tokenizer of transformers, the folder of one, or its name on the hub",
            )
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError.of("transformers", "local") from None
    place, options = Path(tokenizer).expanduser(), {}
    name = str(place) if place.exists() else str(tokenizer)
    if place.suffix == ".gguf":
        name, options = str(place.parent), {"gguf_file": place.name}
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{tokenizer} is no tokenizer: {str(error).partition(chr(10))[0]}",
            remedy="give a tokenizer, the folder of one, or its name on the hub",
        ) from None


def by_library(tokenizer: Any, *methods: str) -> bool:
    """Whether these methods, where there are such, are transformers' own."""
    found = [method for name in methods if (method := getattr(tokenizer, name, None)) is not None]
    # Not `__module__`, which `functools.wraps` copies from what it stands in for.
    homes = [getattr(method, "__globals__", {}).get("__name__", "") for method in found]
    return bool(found) and all(home.startswith(_LIBRARY) for home in homes)


def renders_then_tokenises(tokenizer: Any) -> bool:
    """Whether applying the chat template is rendering it and tokenising the text, as transformers does."""
    return by_library(tokenizer, "apply_chat_template") and by_library(tokenizer, "__call__", "get_chat_template")


def tokenizer_digest(tokenizer: Any, arguments: Mapping[str, Any]) -> str | None:
    """Of everything that decides about the tokens of a prompt; None where that cannot be known."""
    from treetune.fingerprint import code_hash

    parts: dict[str, Any] = {"class": type(tokenizer).__qualname__, "arguments": dict(arguments)}
    parts["versions"] = [_version("transformers"), _version("tokenizers")]
    try:
        cls = type(tokenizer)
        if any(callable(getattr(cls, name, None)) for name in vars(tokenizer)):
            return None  # a method of its own, put in place of the class's
        if by_library(tokenizer, "__call__", "_encode_plus", "_batch_encode_plus", "apply_chat_template"):
            parts["backend"] = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
            parts["special"] = [tokenizer.special_tokens_map, tokenizer.split_special_tokens]
            parts["template"] = tokenizer.chat_template
        else:
            parts["code"] = [code_hash(base) for base in cls.__mro__ if base is not object]
            parts["files"] = _saved(tokenizer)
            if None in parts["code"]:
                return None
        if "strftime_now" in str(parts):
            parts["day"] = date.today().isoformat()
        return digest(parts)
    except (AttributeError, TypeError, ValueError, OSError, NotImplementedError):
        return None


def _saved(tokenizer: Any) -> dict[str, str]:
    """The hashes of the files that a tokenizer is saved as."""
    with tempfile.TemporaryDirectory(prefix="treetune-") as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
