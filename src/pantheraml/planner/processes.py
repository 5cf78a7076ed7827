"""Choose the number of processes of a run, and check that the local ones fit this node."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.planner.choices import Choices
from pantheraml.planner.single_process import wants_single_process
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.train import TrainConfig

SIMPLE_LIMIT = 4
"""Largest number of GPUs for which auto_policy=simple chooses DataParallel."""

MAX_CPU_PROCESSES = 16
"""Processes allowed on a node without GPUs even if it has fewer cores; four per core if that is more."""

_SINGLE_PROCESS_MODES = (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL)


@dataclass(frozen=True)
class LocalDevices:
    """GPUs or CPU cores of this node."""

    size: int
    device: str

    def __str__(self) -> str:
        return f"{self.size} {'GPU(s)' if self.device == 'cuda' else 'CPU core(s)'}"

    @property
    def limit(self) -> int:
        return self.size if self.device == "cuda" else max(MAX_CPU_PROCESSES, 4 * self.size)

    def local_world_size(self, world_size: int, place: ProcessRank | None) -> int:
        """Number of ranks on this node; if the launcher does not say, at most one per device."""
        if place is not None and place.local_world_size is not None:
            return place.local_world_size
        return world_size if place is None else min(world_size, self.size)

    def check(self, world_size: int, place: ProcessRank | None) -> None:
        """DeviceError if the known local ranks do not fit. CPU cores may be oversubscribed."""
        least = 0 if place is None else place.local_rank + 1
        local_world_size = max(least, self.local_world_size(world_size, place))
        if local_world_size > self.limit:
            raise DeviceError(
                f"{local_world_size} processes were requested, but there are {self}.",
                fix=f"Use --nproc {self.limit} or less, or --nproc auto.",
            )

    def warnings(self, local_world_size: int) -> tuple[str, ...]:
        """Warn about oversubscribed CPU cores."""
        if self.device != "cpu" or local_world_size <= self.size:
            return ()
        return (
            f"{local_world_size} processes share {self.size} CPU core(s): fine for a test, but slower than"
            f" {self.size} process(es)",
        )


def check_script_ranks(processes: int, *, gpus: int, cores: int) -> None:
    """DeviceError if this node is too small to relaunch a script as so many ranks."""
    here = LocalDevices(gpus, "cuda") if gpus else LocalDevices(cores, "cpu")
    if processes > here.limit:
        seen = f"{gpus} GPU(s) are visible" if gpus else f"no GPU is visible, and there are {here}"
        raise DeviceError(f"{processes} processes were requested, but {seen}.", fix=f"Request {here.limit} or fewer.")


def choose_mode(config: TrainConfig, gpus: int, choices: Choices) -> TrainConfig:
    """Return the config with the mode that auto_policy=simple chooses; other modes are unchanged."""
    parallel = config.parallel
    if parallel.mode is not MultiGPUMode.AUTO:
        choices.configured("parallel.mode", str(parallel.mode))
        return config
    if parallel.auto_policy != "simple":
        choices.automatic("parallel.mode", "auto", "one process per device is faster than DataParallel")
        return config
    if gpus < 2:
        mode = MultiGPUMode.NONE
    else:
        mode = MultiGPUMode.DATAPARALLEL if gpus <= SIMPLE_LIMIT else MultiGPUMode.DISTRIBUTED
    choices.automatic("parallel.mode", str(mode), f"auto_policy=simple with {gpus} GPU(s)")
    return config.model_copy(update={"parallel": dataclasses.replace(parallel, mode=mode)})


def choose_world_size(config: TrainConfig, local: LocalDevices, place: ProcessRank | None, choices: Choices) -> int:
    requested, mode = config.parallel.world_size, config.parallel.mode
    if requested is not None:
        local.check(requested, place)
        if requested > 1 and mode in _SINGLE_PROCESS_MODES:
            raise ConfigError(
                f"parallel.mode={mode} runs one process, but parallel.world_size is {requested}.",
                fix="Remove one of them.",
            )
        size = requested
        choices.configured("parallel.world_size", size)
    else:
        size, reason = _automatic(config, local)
        choices.automatic("parallel.world_size", size, reason)
    if mode is MultiGPUMode.DISTRIBUTED and size < 2:
        raise DeviceError(
            f"parallel.mode=distributed needs at least two processes, but the run would have {size}.",
            fix="Use parallel.mode=auto, more GPUs or a larger global batch.",
        )
    return size


def _automatic(config: TrainConfig, local: LocalDevices) -> tuple[int, str]:
    """Return the number of processes, and the reason."""
    mode, batch = config.parallel.mode, config.train.global_batch_size
    if mode is MultiGPUMode.DISTRIBUTED and local.device == "cpu":
        raise ConfigError(
            "parallel.mode=distributed on CPUs needs a number of processes.", fix="Set --nproc, or parallel.mode=auto."
        )
    if mode in _SINGLE_PROCESS_MODES:
        return 1, f"parallel.mode is {mode}"
    if wants_single_process(config):
        return 1, "model.device_map is for one process"
    if local.device == "cpu":
        return 1, f"one process uses all {local.size} cores without communication"
    if batch < local.size and not _shares_samples(config):
        return batch, f"{local.size} GPUs, but a global batch of {batch} keeps only {batch} busy"
    return local.size, f"one process per GPU ({local.size})"


def _shares_samples(config: TrainConfig) -> bool:
    """Return True if several processes may work on the same samples."""
    parallel = config.parallel
    degrees = (parallel.tensor, parallel.pipeline, parallel.context)
    return parallel.mode is MultiGPUMode.HYBRID or any(degree is not None for degree in degrees)
