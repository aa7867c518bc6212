"""Multiplication problems as SkyRL rows, for the environment `multiply` of env.py.

python multiply_dataset.py --output_dir ~/data/multiply --num_digits 2
treetune eval multiply_dataset.py:Multiplication -m scripted:gold -n 20
"""

import argparse
import random
import sys
from pathlib import Path

from env import Multiply

from treetune import Task, Taskset, TasksetConfig, register
from treetune.data.validate import validate_dataset, write_tasks

register(id="multiply", entry_point=f"{Path(__file__).resolve().parent}/env.py:Multiply")

SYSTEM = (
    "You are a helpful assistant that solves multiplication problems. Put your final answer in \\boxed{answer} format."
)


class MultiplicationConfig(TasksetConfig, frozen=True, kw_only=True):
    train_size: int = 1000
    val_size: int = 100
    num_digits: int = 2
    """Digits of each factor."""
    split: str = "train"
    """`train` or `validation`; no problem is in both."""


class Multiplication(Taskset[Task, MultiplicationConfig]):
    def load_tasks(self):
        config = self.config
        low, count = 10 ** (config.num_digits - 1), 9 * 10 ** (config.num_digits - 1)
        pairs = random.Random(0).sample(range(count**2), config.train_size + config.val_size)
        part = pairs[: config.train_size] if config.split == "train" else pairs[config.train_size :]
        for idx, pair in enumerate(part):
            yield create_example(low + pair // count, low + pair % count, idx, config)

    def gold(self, task):
        return Multiply.gold(task)


def create_example(a: int, b: int, idx: int, config: MultiplicationConfig) -> Task:
    return Task(
        data_source="synthetic_multiply",
        prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} * {b}?"}],
        env_class="multiply",
        ground_truth=str(a * b),
        reward_spec={"method": "rule"},
        extra_info={"num_digits": config.num_digits, "split": config.split, "index": idx},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="~/data/multiply")
    parser.add_argument("--train_size", type=int, default=1000)
    parser.add_argument("--val_size", type=int, default=100)
    parser.add_argument("--num_digits", type=int, default=2, choices=range(1, 10))
    args = parser.parse_args()
    if min(args.train_size, args.val_size) < 1:
        parser.error("--train_size and --val_size are numbers from 1")
    problems = 81 * 100 ** (args.num_digits - 1)
    if args.train_size + args.val_size > problems:
        parser.error(f"there are only {problems} different problems with --num_digits {args.num_digits}")

    files = [Path(args.output_dir).expanduser() / f"{split}.parquet" for split in ("train", "validation")]
    sizes = {"train_size": args.train_size, "val_size": args.val_size, "num_digits": args.num_digits}
    for file in files:
        taskset = Multiplication(MultiplicationConfig(**sizes, split=file.stem))
        print(f"{write_tasks(taskset.load_tasks(), file, 'skyrl')} examples in {file}")
    sys.exit(0 if validate_dataset(files).ok else 1)


if __name__ == "__main__":
    main()
