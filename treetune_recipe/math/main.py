"""GRPO on math with verl: `python -m treetune_recipe.math.main actor_rollout_ref.model.path=MODEL`."""

import hydra

from treetune_verl.tasks import run_with_tasks


@hydra.main(config_path="config", config_name="math_grpo", version_base=None)
def main(config):
    run_with_tasks(config)


if __name__ == "__main__":
    main()
