"""Steps to 90 % as a table, and the share of right answers by step as a picture.

python curves.py results/*.jsonl > turn_credit.svg        # the table goes to stderr
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train_tiny"))
from curve import COLOURS, GREY, Line, draw_lines

NOT_REACHED = float("inf")


def read(files: list[str]) -> dict[tuple[str, str], list[dict]]:
    """The trainings by task and credit."""
    found = defaultdict(list)
    for file in files:
        for line in Path(file).read_text().splitlines():
            result = json.loads(line)
            found[result["task"], result["credit"]].append(result)
    return dict(sorted(found.items()))


def row(task: str, credit: str, results: list[dict]) -> str:
    steps = sorted(float("inf") if result["steps"] is None else result["steps"] for result in results)
    shown = [f"{each:g}" for each in (statistics.median(steps), steps[0], steps[-1])]
    most = max(len(result["right"]) for result in results)
    shown = [each.replace("inf", f"more than {most}") for each in shown]
    return f"| `{task}` | `{credit}` | {len(steps)} | {shown[0]} | {shown[1]} to {shown[2]} |"


def mean_by_step(results: list[dict], last: int) -> list[tuple[float, float]]:
    """The mean over seeds; one that has ended stays at its last share."""
    curves = [result["right"] for result in results]
    return [(step + 1, statistics.fmean(curve[min(step, len(curve) - 1)] for curve in curves)) for step in range(last)]


def main(files: list[str]) -> None:
    found = read(files)
    print("| task | credit | seeds | median steps | from, to |\n|---|---|---|---|---|", file=sys.stderr)
    for (task, credit), results in found.items():
        print(row(task, credit, results), file=sys.stderr)
    lucky = {credit: results for (task, credit), results in found.items() if task == "luck"}
    last = max(len(result["right"]) for results in lucky.values() for result in results)
    colours = {"turn": COLOURS[0], "outcome": GREY}
    lines = [Line(f"credit: {name}", mean_by_step(results, last), colours[name]) for name, results in lucky.items()]
    print(draw_lines(lines, "steps of GRPO", "right answers, mean over seeds"), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
