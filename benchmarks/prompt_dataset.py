"""PromptDataset over GSM8K x100 in SkyRL's form (747,300 rows), beside SkyRL's own.

    python -m benchmarks.prompt_dataset

Both run in SkyRL's virtual environment, which the slow tests share, each in a process of its own with a cold cache and
a loaded tokenizer (SmolLM2's). CPU counts the processes that they start. `--scale 5` for a quicker look.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import GSM8K, Cost, show

TESTS = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(TESTS))

TASK = ' Let\'s think step by step and output the final answer after "####".'

# Guarded, for SkyRL starts processes that run it again.
RUN = """
import hashlib, json, resource, sys, time

def used(who):
    found = resource.getrusage(who)
    return found.ru_utime + found.ru_stime, found.ru_maxrss / 1024

def both():
    (own, peak), (others, largest) = used(resource.RUSAGE_SELF), used(resource.RUSAGE_CHILDREN)
    return own + others, max(peak, largest)

if __name__ == "__main__":
    whose, files, folder, limit = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if whose == "theirs":
        import skyrl.train.dataset
    before, began = both(), time.perf_counter()
    if whose == "theirs":
        from skyrl.train.dataset import PromptDataset
    else:
        from treetune.trainers.skyrl import PromptDataset
    dataset = PromptDataset([files], tokenizer, limit)
    wall, after = time.perf_counter() - began, both()
    some = range(0, len(dataset), max(1, len(dataset) // 2000))
    began = time.process_time()
    items = [dataset[position] for position in some]
    item = (time.process_time() - began) / len(some)
    prompts = [item["prompt"] if whose == "ours" else item[0] for item in items]
    print(json.dumps({
        "cpu": after[0] - before[0], "wall": wall, "peak": after[1], "base": before[1], "item": item,
        "rows": len(dataset), "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }))
"""


def main() -> None:
    import venvs

    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=100)
    parser.add_argument("--alone", action="store_true", help="without SkyRL, which takes minutes")
    given = parser.parse_args()
    skyrl = venvs.venv(*venvs.SKYRL)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = venvs.smollm2()
        (place / "run.py").write_text(RUN)
        few, many = write(place / "few.parquet", 1), write(place / "many.parquet", given.scale)

        def run(whose: str, rows: Path, limit: int) -> dict[str, Any]:
            return used(skyrl, place, whose, rows, model, limit)

        first, second = run("ours", many, 512), run("ours", many, 512)
        theirs = None if given.alone else run("theirs", many, 512)
        show_start(f"PromptDataset: first start, x{given.scale}", first, theirs, "8x, 500 MB")
        show_start(f"PromptDataset: second start, x{given.scale}", second, theirs, "1 s wall")
        if theirs is not None:
            check_same(first, theirs)
            check_same(run("ours", few, 150), run("theirs", few, 150))


def write(path: Path, scale: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    read = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    writer = None
    for time in range(scale):
        rows = [made(row, time * len(read) + number) for number, row in enumerate(read)]
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return path


def made(row: dict[str, str], index: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"] + TASK}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": row["answer"].rpartition("#### ")[2]},
        "extra_info": {"split": "train", "index": index, "answer": row["answer"], "question": row["question"]},
    }


def used(python: Path, place: Path, whose: str, rows: Path, model: Path, limit: int) -> dict[str, Any]:
    source = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [python, place / "run.py", whose, rows, model, str(limit)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(source),
            "HF_HOME": str(place / "library"),
            "HF_HUB_OFFLINE": "1",
            "TREETUNE_TASK_CACHE_DIR": str(place / "cache"),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def show_start(what: str, ours: dict[str, Any], theirs: dict[str, Any] | None, target: str) -> None:
    beside = ("", None) if theirs is None else ("SkyRL's own", Cost(theirs["cpu"], theirs["wall"]))
    note = f"{ours['peak']:.0f} MB peak, {1e6 * ours['item']:.0f} us an item"
    show(what, Cost(ours["cpu"], ours["wall"]), *beside, target=target, note=note)


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert (ours["rows"], ours["prompts"]) == (theirs["rows"], theirs["prompts"]), "they keep different rows"
    print(f"prompt_dataset: both keep the same {ours['rows']:,} rows")


if __name__ == "__main__":
    main()
