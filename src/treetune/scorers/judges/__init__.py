"""Judges: models that score answers, and their rubrics. `Judge` is the scorer of `kind: judge`."""

from treetune.scorers.judges.judge import Judge as Judge
from treetune.scorers.judges.judge import JudgeError as JudgeError
from treetune.scorers.judges.methods import Criterion as Criterion
from treetune.scorers.judges.methods import Rubric as Rubric
from treetune.scorers.judges.model import JudgeModel as JudgeModel
