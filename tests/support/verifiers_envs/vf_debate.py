"""Two models."""

import verifiers.v1 as vf

__all__ = ["DebateEnv", "DebateTaskset"]


class DebateConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateConfig]):
    async def run(self, task, agents):
        await agents.one.run(task)
        await agents.other.run(task)


class DebateTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="Discuss."), self.config.task)]
