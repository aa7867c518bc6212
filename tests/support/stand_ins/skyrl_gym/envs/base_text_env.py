from skyrl_gym.core import Env


class BaseTextEnv(Env):
    def __init__(self):
        self.turns = 0
        self.max_turns = 1

    def init(self, prompt):
        return prompt, {}

    def get_metrics(self):
        return {}
