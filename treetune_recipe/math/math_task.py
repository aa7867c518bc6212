"""A math task: the answer is parsed from a column such as GSM8K's, which ends in `#### 72`."""

from treetune.scorers.reading.statements import boxed
from treetune_verl.tasks import Task


class MathTask(Task):
    """`answer_key` names the column with the worked answer."""

    def _make_map_fn(self):
        make_row = super()._make_map_fn()
        answer_key = self.config.get("answer_key", "answer")

        def make_math_row(row, index):
            made = make_row(row, index)
            made["ability"] = "math"
            made["reward_model"] = {"style": "rule", "ground_truth": parse_answer(row[answer_key])}
            return made

        return make_math_row


def parse_answer(text):
    """What follows the last `####`, else what the last \\boxed{} holds, without thousands separators."""
    marked = text.rpartition("####")[2] if "####" in text else text
    return [marked, *boxed(marked)][-1].strip().replace(",", "")
