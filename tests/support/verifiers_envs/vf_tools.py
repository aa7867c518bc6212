"""Double a number with a tool, which a server of the task has."""

import verifiers.v1 as vf

__all__ = ["DoubleTaskset"]


class Data(vf.TaskData):
    number: int = 0


class Doubling(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "math"

    @vf.tool
    async def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number


class Double(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Doubling(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def doubled(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(2 * self.data.number))


class DoubleTaskset(vf.Taskset[Double, vf.TasksetConfig]):
    def load(self):
        for n in range(2):
            yield Double(Data(prompt=f"Double {n}.", number=n), self.config.task)


if __name__ == "__main__":  # verifiers starts the server of the tools so
    Doubling.run()
