"""Restart policy: whether and how a run continues after its processes failed.

    killed, failed, hung    restart from the last checkpoint if `parallel.restart_on` lists the reason: `max_retries`
                            times in a row (a new checkpoint resets the count), then with one rank less, down to
                            `parallel.min_world_size`
    out of memory           restart with half as many sequences per micro-batch, down to one

The global batch stays the same, and so does the result.
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
from pantheraml.devices.select import devices_for_run
from pantheraml.planner.plan_run import plan_run
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig

REASONS = {WorkerKilledError: "killed", WorkerError: "failed", HangError: "hung"}
"""Failure classes and their names in `parallel.restart_on`."""


@dataclass(frozen=True)
class Restart:
    """The next attempt of a run."""

    plan: Plan
    message: str
    """Message for the user: why, and from which checkpoint."""


class Restarts:
    def __init__(self, run: RunDir, config: TrainConfig, plan: Plan) -> None:
        self._run, self._config, self._plan = run, config, plan
        self._failed_starts = 0
        """Consecutive restarts without a new checkpoint."""
        self._last_checkpoint = run.last_checkpoint()

    def after(self, err: PantheraError) -> Restart | None:
        """Return the restart after an attempt that ended with `err`; None: the run ends with that error."""
        newest = self._run.last_checkpoint()
        if newest != self._last_checkpoint:
            self._failed_starts, self._last_checkpoint = 0, newest
        start = "the beginning" if newest is None else f"step {newest}"
        resuming = f"{err.what} Resuming from {start}"
        if isinstance(err, PassTooLargeError):
            return self._smaller_micro_batches(resuming)
        if REASONS.get(type(err)) not in self._config.parallel.restart_on:
            return None
        self._failed_starts += 1
        if self._failed_starts <= self._config.parallel.max_retries:
            count = f"restart {self._failed_starts} of {self._config.parallel.max_retries} without a new checkpoint"
            return Restart(self._plan, f"{resuming} ({count}).")
        return self._fewer_ranks(resuming, err)

    def _smaller_micro_batches(self, resuming: str) -> Restart | None:
        before = self._plan.fits or self._plan.micro_batch_size
        if before == 1:
            return None
        half = (before + 1) // 2
        self._plan = self._plan.model_copy(update={"fits": half})
        sequences = "one sequence" if half == 1 else f"{half} sequences"
        message = f"{resuming} with {sequences} per micro-batch; the global batch, and so the result, stays the same."
        return Restart(self._plan, message)

    def _fewer_ranks(self, resuming: str, err: PantheraError) -> Restart | None:
        fewest = self._config.parallel.min_world_size or self._plan.world_size
        devices = self._devices_left(err)
        for size in range(self._plan.world_size - 1, fewest - 1, -1):
            parallel = dataclasses.replace(self._config.parallel, world_size=size, device_ids=devices)
            config = self._config.model_copy(update={"parallel": parallel})
            try:
                plan = plan_run(config, devices_for_run(config), resumed=self._plan)
            except (ConfigError, DeviceError):
                continue  # the configured parallelism does not divide by this world size
            ranks = f"with {size} of {self._plan.world_size} ranks"
            self._plan, self._config = plan.model_copy(update={"fits": self._plan.fits}), config
            self._failed_starts = 0
            return Restart(self._plan, f"{resuming} {ranks}; the global batch, and so the result, stays the same.")
        return None

    def _devices_left(self, err: PantheraError) -> list[int] | None:
        """Return the configured GPUs, without that of the killed rank if it is known."""
        killed = re.match(r"Rank (\d+) was killed", err.what)
        if killed is None or not self._plan.device_ids:
            return self._config.parallel.device_ids
        return [device for rank, device in enumerate(self._plan.device_ids) if rank != int(killed[1])]
