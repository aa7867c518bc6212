"""Runs where SkyRL is installed: reads files with SkyRL's own loader and plays a step in each row's own environment.

python loader_side.py FILES.json RESULTS.json   # {"path": null or what broke}
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    import datasets
    import skyrl_gym
    from loguru import logger
    from skyrl.train.dataset import PromptDataset

    from tiny_model import make_tokenizer

    logger.remove()
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp()
    tokenizer = make_tokenizer()
    results: dict[str, str | None] = {}
    for path in json.loads(Path(sys.argv[1]).read_text()):
        step = "loader"
        try:
            items = PromptDataset([path], tokenizer, max_prompt_length=100_000, num_workers=1)
            step = "items"
            for number in range(len(items)):
                messages, env_class, extras, _ = items[number]
                step = "environment"
                env = skyrl_gym.make(env_class, env_config=SimpleNamespace(), extras=extras)
                env.init(messages)
                reward = env.step(f"#### {extras['reward_spec']['ground_truth']}")["reward"]
                if reward != 1:
                    raise ValueError(f"the gold answer earns {reward}")
            results[path] = None if len(items) else "no rows"
        except BaseException as error:
            results[path] = f"{step}: {type(error).__name__}: {error}"[:300]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
