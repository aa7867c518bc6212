"""SkyRL: registers Treetune's environments with skyrl-gym, and puts tasks into SkyRL's config.

    register()                               # inside the entry-point task, before training begins
    run_with_tasks(config, "tasks.yaml")     # builds the tasks, sets data.train_data and data.val_data, runs SkyRL

From a shell: `python -m treetune.trainers.skyrl tasks=tasks.yaml`, followed by SkyRL's own overrides. `skyrl:NAME`
works the other way: a skyrl-gym environment in Treetune (see `gym.py`). SkyRL is never modified.
"""

from treetune.trainers.skyrl.gym import install_hook, register, remove_hook
from treetune.trainers.skyrl.prompt_dataset import PromptDataset
from treetune.trainers.skyrl.tasks import cli_overrides, main, resolve_tasks_into_config, run_with_tasks, shell_words

__all__ = [
    "PromptDataset",
    "cli_overrides",
    "install_hook",
    "main",
    "register",
    "remove_hook",
    "resolve_tasks_into_config",
    "run_with_tasks",
    "shell_words",
]
