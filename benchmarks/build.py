"""Building parquet from GSM8K x100 (747,300 rows), beside `datasets` map + to_parquet. Run: python -m benchmarks.build

Each way runs in a process of its own with a cold cache, imports and loading included, and writes the same rows: prompt,
ground truth, uid. `--scale 10` for a quicker look.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import GSM8K, Cost, show

OTHERS = ("datasets: per-row map + to_parquet", "datasets: map(batched=True) + to_parquet")

CONFIG = {
    "prompt_template": "Question: {question}\nAnswer:",
    "system_prompt": "You are a math tutor.",
    "data_source": "gsm8k",
    "ground_truth": {"column": "answer", "pattern": "#### (.+)"},
}

HF = """
import re, sys
from datasets import load_dataset
from treetune import Task
source, out, batched = sys.argv[1], sys.argv[2], sys.argv[3] == "batched"
pattern = re.compile("#### (.+)")

def make(row, index):
    prompt = [
        {"role": "system", "content": "You are a math tutor."},
        {"role": "user", "content": "Question: {question}\\nAnswer:".format(**row)},
    ]
    truth = pattern.findall(row["answer"])[-1].strip()
    uid = Task(prompt=prompt, reward_spec={"method": "rule", "ground_truth": truth}).uid
    return {
        "data_source": "gsm8k", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "uid": uid, "scorer": "rule"},
    }

def make_batch(rows, indices):
    names = list(rows)
    made = [make(dict(zip(names, values)), index) for values, index in zip(zip(*rows.values()), indices)]
    return {key: [row[key] for row in made] for key in made[0]}

dataset = load_dataset("json", data_files=source, split="train")
function = make_batch if batched else make
mapped = dataset.map(function, with_indices=True, batched=batched, remove_columns=dataset.column_names)
mapped.to_parquet(out)
"""

OURS = """
import json, sys
from treetune_verl.tasks import Task
source, out, kind = sys.argv[1], sys.argv[2], sys.argv[3]

class Mapped(Task):
    def _make_map_fn(self):
        make = super()._make_map_fn()
        return lambda row, index: make(row, index)

loading = {"args": ["json"], "kwargs": {"data_files": source, "split": "train"}}
config = {"loading_params": loading, **json.loads(sys.argv[4])}
taskset = (Mapped if kind == "mapped" else Task)(config, cache_dir=out + ".cache")
from treetune.data.datasets.build import build
from pathlib import Path
build(taskset, taskset.open_source(), Path(out), "verl")
"""

HIT = """
import json, sys
from treetune_verl.tasks import Task
loading = {"args": ["json"], "kwargs": {"data_files": sys.argv[1], "split": "train"}}
config = {"loading_params": loading, **json.loads(sys.argv[3])}
Task(config, cache_dir=sys.argv[2]).get_parquet_path()
if "--check" in sys.argv:
    assert not {"pyarrow", "datasets"} & set(sys.modules), "a hit loaded what it does not need"
"""


def run(code: str, *arguments: str, home: Path) -> tuple[float, float, float]:
    """CPU and wall seconds, and peak MB."""
    # Compiled modules are kept, as on a user's machine.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "HF_HOME": str(home), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
    )
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, code
    return used.ru_utime + used.ru_stime, time.perf_counter() - began, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=100)
    scale = parser.parse_args().scale
    config = json.dumps(CONFIG)
    if scale < 100:
        print("build: the targets are meant for --scale 100; with fewer rows imports and loading weigh more")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source = place / "source.jsonl"
        with open(source, "wb") as file:
            for _ in range(scale):
                file.write(GSM8K.read_bytes())
        ways = {
            "template task": (OURS, "template", config),
            "a Python _make_map_fn": (OURS, "mapped", config),
            OTHERS[0]: (HF, "row"),
            OTHERS[1]: (HF, "batched"),
        }
        costs: dict[str, tuple[Cost, float]] = {}
        for number, (name, (code, *rest)) in enumerate(ways.items()):
            out = place / f"{number}.parquet"
            cpu, wall, peak = run(code, str(source), str(out), *rest, home=place / f"home{number}")
            costs[name] = (Cost(cpu, wall), peak)
        check_equal([place / f"{number}.parquet" for number in range(len(ways))])
        for name, targets in (("template task", ("6x", "")), ("a Python _make_map_fn", ("3.5x", ""))):
            for other, target in zip(OTHERS, targets, strict=True):
                (ours, peak), (theirs, _) = costs[name], costs[other]
                show(f"build: {name}, x{scale}", ours, other, theirs, target, f"{peak:.0f} MB peak")
        hit(place, source, config)


def hit(place: Path, source: Path, config: str) -> None:
    cache = str(place / "cache")
    run(HIT, str(source), cache, config, home=place / "home0")
    time.sleep(2.1)  # a file this young is hashed again
    run(HIT, str(source), cache, config, "--check", home=place / "home0")
    best = min(Cost(*run(HIT, str(source), cache, config, home=place / "home0")[:2]) for _ in range(5))
    bare = min(Cost(*run("pass", home=place / "home0")[:2]) for _ in range(5))
    show("build: a cache hit", best, "python -c pass", bare, "60 ms more")


def check_equal(files: list[Path]) -> None:
    import pyarrow.parquet as pq

    rows = [pq.ParquetFile(file) for file in files]
    columns = ["data_source", "prompt", "reward_model", "extra_info"]
    first = [file.iter_batches(5000, columns=columns) for file in rows]
    for batches in zip(*first, strict=True):
        assert all(batch.to_pylist() == batches[0].to_pylist() for batch in batches), "the rows differ"
    print("build: all four wrote the same rows")


if __name__ == "__main__":
    main()
