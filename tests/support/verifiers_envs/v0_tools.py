"""Double a number with a tool."""

import verifiers as vf

from datasets import Dataset


def double(number: int) -> int:
    """Double a number.

    Args:
        number: which one
    """
    return 2 * number


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def load_environment():
    rows = [{"question": f"Double {n}.", "answer": str(2 * n)} for n in range(2)]
    return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
