"""The task class."""

from treetune.datasets.taskset import DatasetTaskset as Task

__all__ = ["Task"]
