"""Runs where SkyRL is installed: reads files with SkyRL's own loader and plays a step in each row's own environment.

    python loader_side.py FILES.json RESULTS.json   # [["path"], ["one", "two"]] -> [null, "what broke"]

The files of one list are loaded together.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYOUTS = {"spider": "spider/database", "bird": "bird/train/train_databases", "synsql": "SynSQL-2.5M/databases"}


def main() -> None:
    from loguru import logger
    from skyrl.train.dataset import PromptDataset
    from tiny_model import make_tokenizer

    import datasets

    logger.remove()
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp()
    tokenizer = make_tokenizer()
    databases = Path(tempfile.mkdtemp())
    results: list[str | None] = []
    for paths in json.loads(Path(sys.argv[1]).read_text()):
        step = "loader"
        try:
            items = PromptDataset(paths, tokenizer, max_prompt_length=100_000, num_workers=1)
            step = "items"
            written = [row for path in paths for row in rows_of(Path(path))]
            for number in range(len(items)):
                messages, env_class, extras, _ = items[number]
                compare(messages, env_class, extras, written[number])
                step = "environment"
                play(messages, env_class, extras, databases)
            results.append(None if len(items) else "no rows")
        except BaseException as error:
            results.append(f"{step}: {type(error).__name__}: {error}"[:300])
    Path(sys.argv[2]).write_text(json.dumps(results))


def rows_of(path: Path) -> list[Any]:
    """What was written."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        return [
            {field.name: decoded(row[field.name], field.type) for field in table.schema} for row in table.to_pylist()
        ]
    text = path.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return data if isinstance(data, list) else [data]


def decoded(value: Any, kind: Any) -> Any:
    """A value of parquet; what has Arrow's type for JSON is parsed."""
    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict) and kind.num_fields:
        return {field.name: decoded(value[field.name], field.type) for field in kind}
    return [decoded(item, kind.value_type) for item in value] if isinstance(value, list) else value


def compare(messages: Any, env_class: Any, extras: dict[str, Any], written: dict[str, Any]) -> None:
    """Raises where the loader gives something else than was written, but for nulls and whole floats."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"the prompt is not a list of messages: {messages!r:.80}")
    loaded = {"prompt": messages, "env_class": env_class, **extras}
    for key in loaded.keys() | written.keys():
        if not same(loaded.get(key), written.get(key)):
            raise ValueError(f"{key} is {loaded.get(key)!r:.80}, written was {written.get(key)!r:.80}")


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict) and isinstance(two, dict):
        return all(same(one.get(key), two.get(key)) for key in one.keys() | two.keys())
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        return one == two or (one != one and two != two)
    return isinstance(two, type(one)) and one == two


def play(messages: Any, env_class: str, extras: dict[str, Any], databases: Path) -> None:
    import skyrl_gym

    if env_class == "text2sql":
        make_database(extras, databases)
    # No gold answer searches.
    config = SimpleNamespace(db_path=str(databases), search_url="", topk=3, timeout=1, log_requests=False)
    env = skyrl_gym.make(env_class, env_config=config, extras=extras)
    env.init(messages)
    reward = env.step(gold(env_class, extras))["reward"]
    # What is not a query fails on the database only: `--gold` finds it.
    if reward != 1 and not (env_class == "text2sql" and reward == 0):
        raise ValueError(f"the gold answer earns {reward}")


def make_database(extras: dict[str, Any], databases: Path) -> None:
    """That a database is there is no matter of the file of rows."""
    name, collection = extras.get("db_id"), extras.get("data")
    if isinstance(name, str) and name and isinstance(collection, str) and collection in LAYOUTS:
        folder = databases / LAYOUTS[collection] / name
        folder.mkdir(parents=True, exist_ok=True)
        sqlite3.connect(folder / f"{name}.sqlite").execute("CREATE TABLE IF NOT EXISTS pets (name TEXT)")


def gold(env_class: str, extras: dict[str, Any]) -> str:
    if env_class == "aime":
        return f"Answer: {extras['reward_model']['ground_truth']}"
    truth = extras["reward_spec"]["ground_truth"]
    if env_class == "search":
        target = truth["target"]
        answers = [target] if isinstance(target, str) else target
        return f"<answer>{next(answer for answer in answers if answer)}</answer>"
    if env_class == "text2sql":
        return f"<think>So.</think><solution>{truth}</solution>"
    if env_class == "lcb":
        return f"```python\n{by_heart(json.loads(truth))}\n```"
    return f"<solution>#### {truth}</solution>"


def by_heart(cases: list[dict[str, Any]]) -> str:
    """A program, or a function, that knows what comes out."""
    if cases[0].get("testtype") == "functional":
        called = {repr([json.loads(line) for line in case["input"].split("\n")]): case["output"] for case in cases}
        name = cases[0]["metadata"]["func_name"]
        return f"import json\ndef {name}(*given):\n    return json.loads({called!r}[repr(list(given))])"
    printed = {case["input"].strip(): case["output"] for case in cases}
    return f"import sys\nprint({printed!r}[sys.stdin.read().strip()])"


if __name__ == "__main__":
    main()
