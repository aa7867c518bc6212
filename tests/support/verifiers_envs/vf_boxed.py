"""A task that wants a container."""

import verifiers.v1 as vf

__all__ = ["BoxedTaskset"]


class Boxed(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True


class BoxedTaskset(vf.Taskset[Boxed, vf.TasksetConfig]):
    def load(self):
        return [Boxed(vf.TaskData(prompt="Look around."), self.config.task)]
