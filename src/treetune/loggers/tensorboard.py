"""TensorBoard: event files in the folder `tensorboard` of a run, so that `tensorboard --logdir runs` has them all."""

from __future__ import annotations

import time
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from treetune.config.structs import dump_yaml
from treetune.loggers import About, Sample

FOLDER = "tensorboard"
_STRING = 7  # DT_STRING


class TensorboardLogger:
    def start(self, about: About) -> None:
        self._writer: Any = EventFileWriter(str(about.folder / FOLDER))
        config = "\n".join(f"    {line}" for line in dump_yaml(about.config).splitlines())  # as markdown has code
        self._text("config", config)

    def log(self, figures: dict[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(step, *values)
        self._writer.flush()

    def finish(self, figures: dict[str, float], samples: list[Sample], interrupted: bool) -> None:
        self.log(figures, 0)
        if samples:
            columns = list(samples[0])
            lines = ["|".join(columns), "|".join("---" for _ in columns)]
            lines += ["|".join(_cell(sample[name]) for name in columns) for sample in samples]
            self._text("samples", "\n".join(f"|{line}|" for line in lines))
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=_STRING, string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
        about = create_summary_metadata(display_name="", description="")
        self._add(0, Summary.Value(tag=name, metadata=about, tensor=tensor))

    def _add(self, step: int, *values: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def _cell(value: Any) -> str:
    """In a table of markdown, where HTML of a model's would be markup."""
    text = "" if value is None else str(value)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
