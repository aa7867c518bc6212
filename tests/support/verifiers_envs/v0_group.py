"""Scores rollouts together."""

import verifiers as vf

from datasets import Dataset


def longest(completions, **kwargs):
    return [1.0 for _ in completions]


def load_environment():
    rows = Dataset.from_list([{"question": "?", "answer": "!"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[longest]))
