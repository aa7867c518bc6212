"""Judges: models that score answers, and their rubrics. `Judge` is the scorer `kind: judge`."""

from treetune.judges.judge import Judge as Judge
from treetune.judges.judge import JudgeError as JudgeError
from treetune.judges.model import JudgeModel as JudgeModel
from treetune.judges.rubric import Criterion as Criterion
from treetune.judges.rubric import Rubric as Rubric
