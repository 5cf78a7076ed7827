"""TensorBoard, through its own event-file writer (no torch, no TensorFlow).

View it with `tensorboard --logdir RUN_DIR/tensorboard`.
"""

from __future__ import annotations

import json
from typing import Any

from pantheraml.readers.sinks.sink import Backend, RunIdentity, register, require

FOLDER = "tensorboard"


class TensorBoard:
    def __init__(self, identity: RunIdentity) -> None:
        writers = require("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self._protos = require("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self._summaries = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        self._text_plugin = require("tensorboard.plugins.text.metadata", extra="tensorboard")
        self._tensors = require("tensorboard.util.tensor_util", extra="tensorboard")
        # 10 s instead of the writer's 2 minutes, for watching the curve live.
        self._writer = writers.EventFileWriter(str(identity.run_dir / FOLDER), flush_secs=10)
        if identity.config:
            rows = [f"| {name} | `{json.dumps(value)}` |" for name, value in identity.config.items()]
            self._text("config", "\n".join(["| key | value |", "|---|---|", *rows]))

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._add(values, wall_time=seconds, step=step)

    def finish(self, status: str) -> None:
        self._text("status", status)
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        metadata = self._text_plugin.create_summary_metadata(display_name=None, description=None)
        tensor = self._tensors.make_tensor_proto(text.encode())
        self._add([self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def _add(self, values: list[Any], **fields: Any) -> None:
        self._writer.add_event(self._protos.Event(summary=self._summaries.Summary(value=values), **fields))


@register("tensorboard")
def _open(identity: RunIdentity) -> Backend:
    return TensorBoard(identity)
