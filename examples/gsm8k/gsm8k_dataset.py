"""GSM8K as SkyRL rows: train.parquet and validation.parquet.

python gsm8k_dataset.py --output_dir ~/data/gsm8k
python gsm8k_dataset.py --train train.jsonl --validation test.jsonl      # from files of your own
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

from treetune import Task
from treetune.data.rows import read_rows
from treetune.data.validate import validate_dataset, write_tasks

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def create_example(question: str, answer: str, idx: int, split: str) -> Task:
    return Task(
        data_source="openai/gsm8k",
        prompt=[{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        env_class="gsm8k",
        ground_truth=final_number(answer),
        reward_spec={"method": "rule"},
        ability="math",
        extra_info={"split": split, "index": idx, "answer": answer, "question": question},
    )


def final_number(answer: str) -> str:
    """What stands after `####`, without thousands separators: the environment compares text."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="~/data/gsm8k")
    parser.add_argument("--train", default="openai/gsm8k@main:train", help="a hub dataset, or parquet and JSON files")
    parser.add_argument("--validation", default="openai/gsm8k@main:test")
    parser.add_argument("--train_size", type=int, help="at most so many rows; all unless given")
    parser.add_argument("--val_size", type=int)
    args = parser.parse_args()
    if any(size is not None and size < 1 for size in (args.train_size, args.val_size)):
        parser.error("--train_size and --val_size are numbers from 1")

    output = Path(args.output_dir).expanduser()
    files = [output / "train.parquet", output / "validation.parquet"]
    for file, source, size in zip(files, (args.train, args.validation), (args.train_size, args.val_size), strict=True):
        rows = enumerate(islice(read_rows(source), size))
        try:
            tasks = (create_example(row["question"], row["answer"], idx, file.stem) for idx, row in rows)
            print(f"{write_tasks(tasks, file, 'skyrl')} examples in {file}")
        except KeyError as column:
            sys.exit(f"{source}: a row has no {column}; GSM8K's columns are question and answer")
    sys.exit(0 if validate_dataset(files).ok else 1)


if __name__ == "__main__":
    main()
