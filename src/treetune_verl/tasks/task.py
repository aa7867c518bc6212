"""The task class."""

from treetune.data.datasets.taskset import DatasetTaskset as Task

__all__ = ["Task"]
