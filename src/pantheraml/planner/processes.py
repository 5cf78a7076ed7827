"""How many processes a run has, and how many of them are on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.planner.choices import Choices
from pantheraml.planner.one_process import wants_one_process
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.train import TrainConfig

SIMPLE_LIMIT = 4
"""GPUs up to which auto_policy=simple takes DataParallel."""

CROWD = 16
"""Processes that a machine without GPUs may have though it has fewer cores; or four a core, if that is more."""

_ONE_PROCESS = (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL)


@dataclass(frozen=True)
class Room:
    """What this machine has for processes of its own: GPUs, or cores."""

    size: int
    device: str

    def __str__(self) -> str:
        return f"{self.size} {'GPU(s)' if self.device == 'cuda' else 'CPU core(s)'}"

    def processes_here(self, world_size: int, place: ProcessRank | None) -> int:
        """Of all processes, those on this machine; where nobody said, as many as it has room for."""
        if place is not None and place.local_world_size is not None:
            return place.local_world_size
        return world_size if place is None else min(world_size, self.size)

    def check(self, world_size: int, place: ProcessRank | None) -> None:
        """DeviceError if the processes of this machine, as far as they are known, do not fit. Those on CPUs may take
        turns."""
        least = 0 if place is None else place.local_rank + 1
        here = max(least, self.processes_here(world_size, place))
        most = self.size if self.device == "cuda" else max(CROWD, 4 * self.size)
        if here > most:
            raise DeviceError(
                f"{here} processes were asked for, but there are {self}.",
                todo=f"Use --nproc {most} or less, or --nproc auto.",
            )

    def warnings(self, here: int) -> tuple[str, ...]:
        """That processes on CPUs have to take turns, if they do."""
        if self.device != "cpu" or here <= self.size:
            return ()
        return (
            f"{here} processes share {self.size} CPU core(s) and take turns: right for a test, and slower than"
            f" {self.size} process(es)",
        )


def choose_mode(config: TrainConfig, gpus: int, choices: Choices) -> TrainConfig:
    """The configuration with the mode that auto_policy=simple chooses; any other stays as it is."""
    parallel = config.parallel
    if parallel.mode is not MultiGPUMode.AUTO:
        choices.asked("parallel.mode", str(parallel.mode))
        return config
    if parallel.auto_policy != "simple":
        choices.automatic("parallel.mode", "auto", "one process per device, which is faster than copies in one process")
        return config
    if gpus < 2:
        mode = MultiGPUMode.NONE
    else:
        mode = MultiGPUMode.DATAPARALLEL if gpus <= SIMPLE_LIMIT else MultiGPUMode.DISTRIBUTED
    choices.automatic("parallel.mode", str(mode), f"auto_policy=simple, and there are {gpus} GPU(s)")
    return config.model_copy(update={"parallel": dataclasses.replace(parallel, mode=mode)})


def choose_world_size(config: TrainConfig, room: Room, place: ProcessRank | None, choices: Choices) -> int:
    asked, mode = config.parallel.world_size, config.parallel.mode
    if asked is not None:
        room.check(asked, place)
        if asked > 1 and mode in _ONE_PROCESS:
            raise ConfigError(
                f"parallel.mode={mode} runs one process, but {asked} were asked for.", todo="Drop one of them."
            )
        size = asked
        choices.asked("parallel.world_size", size)
    else:
        size, reason = _automatic(config, room)
        choices.automatic("parallel.world_size", size, reason)
    if mode is MultiGPUMode.DISTRIBUTED and size < 2:
        raise DeviceError(
            f"parallel.mode=distributed needs at least two processes, but the run would have {size}.",
            todo="Use parallel.mode=auto, more GPUs or a larger global batch.",
        )
    return size


def _automatic(config: TrainConfig, room: Room) -> tuple[int, str]:
    """How many, and why."""
    mode, batch = config.parallel.mode, config.train.global_batch_size
    if mode is MultiGPUMode.DISTRIBUTED and room.device == "cpu":
        raise ConfigError(
            "parallel.mode=distributed on CPUs needs a number of processes.", todo="Set --nproc, or parallel.mode=auto."
        )
    if mode in _ONE_PROCESS:
        return 1, f"parallel.mode is {mode}"
    if wants_one_process(config):
        return 1, "model.device_map places the model of one process"
    if room.device == "cpu":
        return 1, f"one process uses all {room.size} cores without communication"
    if batch < room.size and not _divides_the_model(config):
        return batch, f"{room.size} GPUs, but a global batch of {batch} gives work to {batch} only"
    return room.size, f"one process per GPU ({room.size})"


def _divides_the_model(config: TrainConfig) -> bool:
    """Whether processes may work on the same samples."""
    parallel = config.parallel
    degrees = (parallel.tensor, parallel.pipeline, parallel.context)
    return parallel.mode is MultiGPUMode.HYBRID or any(degree is not None for degree in degrees)
