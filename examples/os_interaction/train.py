"""Train on a running task server with AReaL: see README.md, and config.yaml for every knob."""

import sys
from dataclasses import asdict, dataclass, field

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config

from datasets import load_dataset

WORKFLOW = "examples.os_interaction.workflow.OSInteractionWorkflow"


@dataclass
class TaskServer:
    url: list[str] = field(default_factory=lambda: ["http://127.0.0.1:5000"])
    max_turns: int = 8
    timeout: float = 120.0
    patience: float = 60.0


@dataclass
class Config(GRPOConfig):
    task_server: TaskServer = field(default_factory=TaskServer)


def main(arguments: list[str]) -> None:
    config, _ = load_expr_config(arguments, Config)
    train, valid = (
        load_dataset("json", data_files=part.path, split="train")
        for part in (config.train_dataset, config.valid_dataset)
    )
    shared = {"tokenizer": config.tokenizer_path, **asdict(config.task_server)}
    with PPOTrainer(config, train_dataset=train, valid_dataset=valid) as trainer:
        trainer.train(
            workflow=WORKFLOW,
            workflow_kwargs={"gconfig": config.gconfig, **shared},
            eval_workflow=WORKFLOW,
            eval_workflow_kwargs={"gconfig": config.eval_gconfig, **shared},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
