from dataclasses import dataclass

from skyrl_gym.envs.base_text_env import BaseTextEnv


class Gsm8k(BaseTextEnv):
    """Compares with text, as the real one does."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.truth = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        reward = float(action == f"#### {self.truth}" and isinstance(self.truth, str))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


@dataclass
class CountingConfig:
    db_path: str = "/nowhere"
    step: int = 1


class Counting(BaseTextEnv):
    """Tells what it was given, and counts to `max_turns`."""

    closed = 0

    def __init__(self, env_config: CountingConfig, extras: dict):
        super().__init__()
        self.config, self.extras = env_config, extras
        self.max_turns = extras.get("max_turns", 2)

    def init(self, prompt):
        prompt.append({"role": "user", "content": "Count."})
        return prompt, {}

    def step(self, action):
        self.turns += self.config.step
        done = self.turns >= self.max_turns
        seen = {"role": "user", "content": str(self.turns)}
        metadata = {"db_path": self.config.db_path, "object": object}
        return {"observations": [] if done else [seen], "reward": self.turns, "done": done, "metadata": metadata}

    def get_metrics(self):
        return {"counted": self.turns, "word": "text"}

    def close(self):
        Counting.closed += 1
