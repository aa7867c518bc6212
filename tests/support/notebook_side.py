"""A notebook that is executed by the real Jupyter kernel; what each cell showed, by kind, as one JSON object."""

from __future__ import annotations

import json

import nbformat
from nbclient import NotebookClient

CELLS = [
    "import treetune\nrun = treetune.evaluate('arithmetic', 'scripted:p=0.5', num_tasks=10, output='run')",
    "run",
    "run.groups()",
    "again = await treetune.evaluate_async('arithmetic', 'scripted:p=0.5', num_tasks=10, output='again')\n"
    "again.mean_reward == run.mean_reward",
    """
class Doubles(treetune.Taskset):
    def load_tasks(self):
        return [treetune.Task(prompt=str(n), reward_spec={"ground_truth": str(2 * n)}) for n in range(6)]

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

def double(request):
    return str(2 * int(request.messages[-1]["content"]))

treetune.evaluate(Doubles, double, num_tasks=3, output="doubles")
len(treetune.evaluate(Doubles, double, num_tasks=6, output="doubles", resume=True))
""",
]


def main() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = []
    for cell in notebook.cells:
        kinds = {}
        for output in cell.outputs:
            kinds |= output.get("data", {output.get("name", "error"): output.get("text", "")})
        shown.append(kinds)
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
