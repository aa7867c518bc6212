"""How a model acts on a Linux machine behind a task server: the generic workflow with two hooks of its own."""

from typing import Any

from treetune.trainers.areal import TaskServerWorkflow


class OSInteractionWorkflow(TaskServerWorkflow):
    def format_observation_to_messages(self, observation: dict[str, Any], history: list[Any]) -> list[Any]:
        """What a script printed is told apart from what a person says."""
        if observation["type"] == "text" and any(message["role"] == "assistant" for message in history):
            observation = {**observation, "content": f"The machine says:\n\n{observation['content']}"}
        return super().format_observation_to_messages(observation, history)

    def postprocess_reward(self, reward: float, num_turns: int, info: dict[str, Any]) -> float:
        """Who is right within three turns earns more; there is no other discount."""
        return reward + 0.5 if info.get("success") and num_turns <= 3 else reward
