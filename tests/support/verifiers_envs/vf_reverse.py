"""Reverse a word: what was said is all that its reward needs."""

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]


class Data(vf.TaskData):
    answer: str = ""


class Config(vf.TasksetConfig):
    words: int = 4


class Reverse(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        if "broken" in (trace.last_reply or ""):
            raise ValueError("cannot be read")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 10)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class ReverseTaskset(vf.Taskset[Reverse, Config]):
    def load(self):
        for n in range(self.config.words):
            word = "abcdef"[: n + 1]
            yield Reverse(
                Data(prompt=f"Reverse {word}.", system_prompt="Be brief.", answer=word[::-1]), self.config.task
            )
