"""Guess a number, in four turns at most."""

import verifiers as vf

from datasets import Dataset


class GuessEnv(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said, number = messages[-1]["content"], state["answer"]
        return [{"role": "user", "content": "Higher." if said < number else "Lower."}]

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def load_environment():
    rows = [{"question": "Guess a number from 0 to 9.", "answer": str(n)} for n in range(5)]
    return GuessEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=4)
