"""Double a number, in one turn."""

import verifiers as vf

from datasets import Dataset


def load_environment(number: int = 4, **kwargs):
    rows = [{"question": f"Double {n}.", "answer": str(2 * n), "info": {"n": n}} for n in range(number)]

    def doubled(completion, answer, info, **kwargs):
        if info["n"] == 3:
            raise RuntimeError("the judge is away")
        return float(int(completion[-1]["content"]) == int(answer))

    rubric = vf.Rubric(funcs=[doubled], weights=[1.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:1]), rubric=rubric)
