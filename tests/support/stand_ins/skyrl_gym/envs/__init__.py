from skyrl_gym.envs.registration import register

register(id="gsm8k", entry_point="skyrl_gym.envs.theirs:Gsm8k")
register(id="counting", entry_point="skyrl_gym.envs.theirs:Counting")
