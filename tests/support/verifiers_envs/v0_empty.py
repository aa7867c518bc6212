"""No tasks at all."""

import verifiers as vf

from datasets import Dataset


def load_environment():
    rows = Dataset.from_list([{"question": "?", "answer": "!"}]).select([])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[lambda **kwargs: 1.0]))
