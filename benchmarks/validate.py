"""Checking GSM8K x100 in SkyRL's form (747,300 rows), beside the usual script. Run: python -m benchmarks.validate

The script loads the file with `datasets` and looks into every row, as SkyRL users do. Each way runs in a process of its
own, imports included. `--scale 5` for a quicker look.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import GSM8K, Cost, show

SCRIPT = """
import sys, tempfile
from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
ds = load_dataset("parquet", data_files=sys.argv[1], cache_dir=sys.argv[2])["train"]
errors = []
for i, item in enumerate(ds):
    for field in ("prompt", "env_class", "reward_spec"):
        if field not in item:
            errors.append(f"Row {i}: Missing {field!r}")
    if not isinstance(item["prompt"], list):
        errors.append(f"Row {i}: 'prompt' must be a list")
    elif not any(m.get("role") == "user" for m in item["prompt"]):
        errors.append(f"Row {i}: No 'user' message in prompt")
    if "ground_truth" not in item["reward_spec"]:
        errors.append(f"Row {i}: Missing 'ground_truth' in reward_spec")
assert not errors and len(ds) == int(sys.argv[3])
"""

OURS = """
import sys
from treetune.data.validate import validate
report = validate(sys.argv[1], quick=sys.argv[2] == "quick")
assert report.ok and report.rows == int(sys.argv[3]), report
"""

MEASURED = """
import resource, sys, time
sys.argv[1:], code = sys.argv[2:], sys.argv[1]
began = time.perf_counter()
exec(code)
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which begins with what the parent had.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used.ru_utime + used.ru_stime, time.perf_counter() - began, int(peak) // 1024)
"""


def write(path: Path, scale: int) -> int:
    """SkyRL rows as the examples of its guide make them, by `datasets`."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    examples = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    asked = ' Let\'s think step by step and output the final answer after "####".'

    def rows():  # type: ignore[no-untyped-def]
        for number in range(scale * len(examples)):
            example = examples[number % len(examples)]
            yield {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": example["question"] + asked}],
                "env_class": "gsm8k",
                "reward_spec": {
                    "method": "rule",
                    "ground_truth": example["answer"].split("#### ")[-1].replace(",", ""),
                },
                "extra_info": {"split": "train", "index": number, **example},
            }

    Dataset.from_generator(rows, cache_dir=str(path.parent / "made")).to_parquet(path)
    return scale * len(examples)


def measured(code: str, *arguments: str) -> tuple[Cost, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, code, *arguments], capture_output=True, text=True, check=True
    )
    cpu, wall, memory = map(float, done.stdout.split())
    return Cost(cpu, wall), int(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=100, help="how many times GSM8K")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    if not GSM8K.exists():
        print(f"no data at {GSM8K}: nothing measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        count = write(path, arguments.scale)
        print(f"{count:,} rows, {path.stat().st_size / 1e6:.0f} MB")
        theirs, memory = measured(SCRIPT, str(path), str(Path(folder) / "cache"), str(count))
        beside = (f"the usual script, {memory} MB", theirs)
        for name, kind, target in (
            ("validate --quick", "quick", "80x, 300 MB"),
            ("validate, all rules", "all", ""),
        ):
            ours, memory = min(measured(OURS, str(path), kind, str(count)) for _ in range(arguments.repeat))
            show(f"{name}, {count:,} rows", ours, *beside, target=target, note=f"{memory} MB")


if __name__ == "__main__":
    main()
