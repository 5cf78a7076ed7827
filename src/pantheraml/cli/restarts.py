"""Whether a run whose processes ended badly goes on, and how: as before, with smaller passes, or with fewer processes.

    killed, failed, hung    again from the last checkpoint, where `parallel.restart_on` says so: `max_retries` times in
                            a row, counted anew after each checkpoint that was reached since; then, down to
                            `parallel.min_world_size`, with one process less
    out of memory           with half as many sequences at a time, down to one

The global batch is the same in all of them, and so is the result.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from pantheraml.base.errors import (
    ConfigError,
    DeviceError,
    HangError,
    PantheraError,
    PassTooLargeError,
    WorkerError,
    WorkerKilledError,
)
from pantheraml.devices.probe import probe
from pantheraml.planner.choose import choose
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig

REASONS = {WorkerKilledError: "killed", WorkerError: "failed", HangError: "hung"}
"""Why processes ended, in the words of `parallel.restart_on`."""


@dataclass(frozen=True)
class NextStart:
    """How the run goes on."""

    plan: Plan
    told: str
    """What people should know of it."""


class Restarts:
    def __init__(self, run: RunDir, config: TrainConfig, plan: Plan) -> None:
        self._run, self._config, self._plan = run, config, plan
        self._in_vain = 0
        self._reached = run.last_checkpoint()

    def after(self, err: PantheraError) -> NextStart | None:
        """What comes after a start that ended with `err`; None: that is the end of the run."""
        newest = self._run.last_checkpoint()
        if newest != self._reached:
            self._in_vain, self._reached = 0, newest
        start = "the beginning" if newest is None else f"step {newest}"
        going_on = f"{err.what} The run goes on from {start}"
        if isinstance(err, PassTooLargeError):
            return self._smaller_passes(going_on)
        if REASONS.get(type(err)) not in self._config.parallel.restart_on:
            return None
        self._in_vain += 1
        if self._in_vain <= self._config.parallel.max_retries:
            number = f"start {self._in_vain} of {self._config.parallel.max_retries} without a new checkpoint"
            return NextStart(self._plan, f"{going_on} ({number}).")
        return self._fewer_processes(going_on, err)

    def _smaller_passes(self, going_on: str) -> NextStart | None:
        before = self._plan.fits or self._plan.micro_batch_size
        if before == 1:
            return None
        half = (before + 1) // 2
        self._plan = self._plan.model_copy(update={"fits": half})
        passes = "one sequence" if half == 1 else f"{half} sequences"
        told = f"{going_on} with {passes} at a time; the global batch, and so the result, stays."
        return NextStart(self._plan, told)

    def _fewer_processes(self, going_on: str, err: PantheraError) -> NextStart | None:
        fewest = self._config.parallel.min_world_size or self._plan.world_size
        devices = self._devices_left(err)
        for size in range(self._plan.world_size - 1, fewest - 1, -1):
            parallel = dataclasses.replace(self._config.parallel, world_size=size, device_ids=devices)
            config = self._config.model_copy(update={"parallel": parallel})
            try:
                plan = choose(config, probe())
            except (ConfigError, DeviceError):
                continue  # so many cannot divide the work as the configuration asks
            told = f"with {size} of {self._plan.world_size} processes; the global batch, and so the result, stays."
            self._plan, self._config, self._in_vain = plan.model_copy(update={"fits": self._plan.fits}), config, 0
            return NextStart(self._plan, f"{going_on} {told}")
        return None

    def _devices_left(self, err: PantheraError) -> list[int] | None:
        """The GPUs without that of the rank whose end it was, if that is known; None: as the configuration says."""
        told = re.match(r"Rank (\d+) was killed", err.what)
        if told is None or not self._plan.device_ids:
            return self._config.parallel.device_ids
        return [device for rank, device in enumerate(self._plan.device_ids) if rank != int(told[1])]
