"""How long training waits for a checkpoint: written by a thread from a copy in host memory, or while it waits.

The state is that of float32 weights and AdamW, on the GPU if there is one. The first save of a run makes the memory
that later ones copy into. The disk is that of the temporary folder.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from table import Column, Table, milliseconds

TABLE = Table(
    title="Saving a checkpoint",
    how="Weights and AdamW states of the given size; median of the saves after the first.",
    columns=(
        Column("device", "device"),
        Column("size", "bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
        Column("written", "written"),
        Column("training waits, first save", "first_seconds", milliseconds),
        Column("training waits, later saves", "later_seconds", milliseconds),
        Column("until it is on disk", "disk_seconds", milliseconds),
    ),
)


def run(*, million_parameters: int = 20, saves: int = 5) -> dict[str, Any]:
    rows = [measure(million_parameters, saves, background) for background in (False, True)]
    return {"parameters": {"million_parameters": million_parameters, "saves": saves}, "results": rows}


def measure(million_parameters: int, saves: int, background: bool) -> dict[str, Any]:
    import torch

    from pantheraml.checkpoint.store import CheckpointStore
    from pantheraml.engine.saving import Saver
    from pantheraml.parallel.process_group import World
    from pantheraml.specs.train import CheckpointConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    live = {
        group: {f"{group}.{number}": torch.randn(2**20, device=device) for number in range(count * million_parameters)}
        for group, count in (("weights", 1), ("optimizer", 2))
    }
    told: list[dict[str, Any]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        if kind == "checkpoint.saved":
            told.append(fields)

    with tempfile.TemporaryDirectory() as name:
        store = CheckpointStore(Path(name) / "checkpoints")
        with Saver(store, CheckpointConfig(background=background), World(0, 1, device), emit) as saver:
            for step in range(1, saves + 1):
                begin = time.perf_counter()
                bring = Bring(saver.copies)
                tensors = {group: {key: bring(key, t) for key, t in named.items()} for group, named in live.items()}
                bring.wait()
                saver.start(step, tensors, {}, best_step=None, begin=begin)
                saver.finish()  # there is time between two saves
    waits = [event["stall_seconds"] for event in told]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "bytes": told[-1]["bytes"],
        "written": "by a thread" if background else "in line",
        "first_seconds": waits[0],
        "later_seconds": statistics.median(waits[1:]),
        "disk_seconds": statistics.median(event["seconds"] for event in told[1:]),
    }


class Bring:
    """To the host, as `engine.state.capture` does it."""

    def __init__(self, copies: Any) -> None:
        self._copies = copies

    def __call__(self, name: str, tensor: Any) -> Any:
        return tensor.cpu() if self._copies is None else self._copies.take(name, tensor)

    def wait(self) -> None:
        if self._copies is not None:
            self._copies.wait()


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
