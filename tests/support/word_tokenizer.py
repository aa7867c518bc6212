"""A tokenizer whose tokens are words, with no library behind it: what a PromptDataset must do for any object."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from zlib import crc32


class WordTokenizer:
    pad_token_id = 0

    def __init__(self, log: Path | None = None, system: str = "be brief", seconds: float = 0.0) -> None:
        self.log, self.system, self.seconds = log, system, seconds

    def apply_chat_template(
        self,
        prompt: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        shout: bool = False,
    ) -> Any:
        if any(message["role"] == "oracle" for message in prompt):
            raise ValueError("no oracles")
        if self.log is not None:
            with self.log.open("a") as file:
                file.write("x")
        time.sleep(self.seconds)
        words = self.system.split() + ["loud"] * shout
        for message in prompt:
            words += [message["role"], *str(message["content"]).split()]
        words += ["assistant"] * add_generation_prompt
        if not tokenize:
            return " ".join(words)
        ids = [crc32(word.encode()) % 1000 + 1 for word in words]
        return {"input_ids": ids} if return_dict else ids

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text(json.dumps({"system": self.system}))

    @property
    def counted(self) -> int:
        """How many prompts it was asked about, in all processes."""
        return self.log.stat().st_size if self.log is not None and self.log.exists() else 0


def length(tokenizer: WordTokenizer, prompt: Any, **arguments: Any) -> int:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments))
