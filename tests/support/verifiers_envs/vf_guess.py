"""Guess a number: an environment of its own that answers each guess. Without end."""

import itertools

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class Data(vf.TaskData):
    number: int = 0


class Guess(vf.Task[Data]):
    pass


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        right = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(4):
                if segment.terminated:
                    break
                said, number = segment.last_reply, str(task.data.number)
                if right := said == number:
                    break
                segment = await interaction.turn("Higher." if said < number else "Lower.")
        interaction.trace.record_reward("found", float(right), 1.0)


class GuessTaskset(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield Guess(Data(prompt="Guess a number from 0 to 9.", number=n % 10), self.config.task)
