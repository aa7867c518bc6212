"""slime: takes prompts from a taskset, and plays environment episodes as rollouts.

--data-source-path treetune.trainers.slime.TreetuneData --prompt-data TARGET
--custom-generate-function-path treetune.trainers.slime.generate
--custom-rm-path treetune.trainers.slime.reward

slime itself is never modified, and is imported only when one of these is called.
"""

from treetune.trainers.slime.credit import advantages, group_rewards
from treetune.trainers.slime.data import TreetuneData
from treetune.trainers.slime.rollouts import generate, reward
from treetune.trainers.slime.samples import evaluate, keep_played, log_evaluation, log_rollouts

__all__ = [
    "TreetuneData",
    "advantages",
    "evaluate",
    "generate",
    "group_rewards",
    "keep_played",
    "log_evaluation",
    "log_rollouts",
    "reward",
]
