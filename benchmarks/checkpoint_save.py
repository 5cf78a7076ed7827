"""Time that training stalls for a checkpoint: written by a background thread from a copy in host memory, or inline.

The state is float32 weights and AdamW moments, on the GPU if there is one. The methods alternate, torch.save among
them, so that all see the same disk (that of the temporary folder) and the same load. The first save of a run allocates
the host memory that later ones reuse. While the thread writes, matmuls run as in a training step, to measure how much
it slows them down.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from table import Column, Table, milliseconds

TABLE = Table(
    title="Checkpoint saving",
    how="Weights and AdamW states of the given size; medians of the saves after the first, methods alternating.",
    columns=(
        Column("device", "device"),
        Column("size", "bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
        Column("method", "written"),
        Column("stall, first save", "first_seconds", milliseconds),
        Column("stall, later saves", "later_seconds", milliseconds),
        Column("time to disk", "disk_seconds", milliseconds),
        Column("stall / time to disk", "share", lambda value: f"{100 * value:.1f} %"),
        Column("slowdown of matmuls meanwhile", "slowdown", lambda value: f"{value:.2f}x"),
    ),
)

WORK = 1024
"""Size of the square matrices multiplied while a thread writes."""


def run(*, million_parameters: int = 20, saves: int = 5) -> dict[str, Any]:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        live = state(million_parameters, device)
        methods: dict[str, TorchSave | Ours] = {
            "by torch.save, flushed": TorchSave(folder / "torch.pt", live),
            "in line": stack.enter_context(Ours(folder / "inline", live, device, background=False)),
            "by a thread": stack.enter_context(Ours(folder / "thread", live, device, background=True)),
        }
        for step in range(1, saves + 1):
            for method in methods.values():
                method.save(step)
        size = sum(tensor.nbytes for group in live.values() for tensor in group.values())
        rows = [{"written": name, "bytes": size, **result(method)} for name, method in methods.items()]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {
        "parameters": {"million_parameters": million_parameters, "saves": saves},
        "results": [{"device": name, **row} for row in rows],
    }


def state(million_parameters: int, device: Any) -> dict[str, dict[str, Any]]:
    import torch

    return {
        group: {f"{group}.{number}": torch.randn(2**20, device=device) for number in range(count * million_parameters)}
        for group, count in (("weights", 1), ("optimizer", 2))
    }


def result(method: TorchSave | Ours) -> dict[str, Any]:
    waits, disk = statistics.median(method.waits[1:]), statistics.median(method.disk[1:])
    return {
        "first_seconds": method.waits[0],
        "later_seconds": waits,
        "disk_seconds": disk,
        "share": waits / disk,
        "slowdown": statistics.median(method.slowdowns) if method.slowdowns else None,
    }


class TorchSave:
    """Plain torch.save, neither checksummed nor renamed into place."""

    def __init__(self, file: Path, live: dict[str, dict[str, Any]]) -> None:
        self._file, self._live = file, live
        self.waits: list[float] = []
        self.disk, self.slowdowns = self.waits, list[float]()

    def save(self, _step: int) -> None:
        import os

        import torch

        begin = time.perf_counter()
        with open(self._file, "wb") as file:
            torch.save(self._live, file)
            file.flush()
            os.fsync(file.fileno())
        self.waits.append(time.perf_counter() - begin)


class Ours:
    """Saves as `engine.loop` does, with a given state instead of the one gathered from a run."""

    def __init__(self, folder: Path, live: dict[str, dict[str, Any]], device: Any, *, background: bool) -> None:
        from pantheraml.checkpoint.store import CheckpointStore
        from pantheraml.engine.state.saving import Saver
        from pantheraml.parallel.process_group import World
        from pantheraml.specs.train import CheckpointConfig

        folder.mkdir()
        store = CheckpointStore(folder / "checkpoints")
        self._saver = Saver(store, CheckpointConfig(background=background, keep=1), World(0, 1, device), self._on_event)
        self._live, self._work = live, matmul_timer(device)
        self.waits: list[float] = []
        self.disk: list[float] = []
        self.slowdowns: list[float] = []

    def __enter__(self) -> Ours:
        self._saver.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._saver.__exit__(*problem)

    def _on_event(self, event: Any, /) -> None:
        kind, fields = event.kind, event.model_dump()
        if kind == "checkpoint.saved":
            self.waits.append(fields["stall_seconds"])
            self.disk.append(fields["stall_seconds"] + (fields["seconds"] if self._saver.copies else 0.0))

    def save(self, step: int) -> None:
        from pantheraml.checkpoint.sharded_files import unsharded

        copies = self._saver.copies
        alone = [self._work() for _ in range(5)] if copies else []
        begin = time.perf_counter()
        take = (lambda _name, tensor: tensor.cpu()) if copies is None else copies.take
        groups = {g: unsharded({name: take(name, t) for name, t in named.items()}) for g, named in self._live.items()}
        if copies is not None:
            copies.wait()
        self._saver.start(step, groups, {}, best_step=None, begin=begin)
        meanwhile = []
        while copies is not None and len(self.waits) < step:
            meanwhile.append(self._work())
            self._saver.poll()
        if step > 1 and meanwhile:
            self.slowdowns.append(statistics.median(meanwhile) / statistics.median(alone))


def matmul_timer(device: Any) -> Callable[[], float]:
    """Return a function that times a few matmuls."""
    import torch

    left = torch.randn(WORK, WORK, device=device)

    def work() -> float:
        begin = time.perf_counter()
        for _ in range(4):
            left @ left
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return work


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
