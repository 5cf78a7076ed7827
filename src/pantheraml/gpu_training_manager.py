"""`MultiGPUTrainingManager`: find out what this host has, and make the trainer for it. Only a trainer needs torch."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pantheraml.base import env, log
from pantheraml.gpu_monitor import GPUConfig, GPUMonitor

if TYPE_CHECKING:
    from pantheraml.gpu_trainers import DataParallelTrainer, DistributedDataParallelTrainer

__all__ = ["MultiGPUTrainingManager"]

logger = log.get(__name__)


class MultiGPUTrainingManager:
    """As a context manager, it cleans up at the end."""

    def __init__(self, gpu_config: GPUConfig | None = None) -> None:
        """None: as `detect_gpu_configuration` finds."""
        self.config = gpu_config
        self._trainers: list[DataParallelTrainer | DistributedDataParallelTrainer] = []

    def detect_gpu_configuration(self) -> GPUConfig:
        """Return, and use from here on, a config with the GPUs of this host that are healthy and free.

        A rank that a launcher started gets the GPU of its rank: no GPUs are listed.
        """
        log.start_for_scripts()
        several = env.process_rank().world_size > 1
        found = GPUMonitor(GPUConfig()).select_gpus()
        self.config = GPUConfig(
            use_multi_gpu=several or len(found.indices) > 1,
            gpu_ids=[] if several else list(found.indices),
            distributed_training=several,
            backend="nccl" if found.indices else "gloo",
        )
        logger.info("GPUs to use: %s: %s", list(found.indices) or "none", found.reason)
        return self.config

    def setup_trainer(
        self, distributed: bool | None = None, **options: Any
    ) -> DataParallelTrainer | DistributedDataParallelTrainer:
        """Make a trainer of the config, which is detected if there is none yet.

        `distributed` None: as the config says. `options`: those of the trainer, such as `optimizer_config`, `loss_fn`.
        """
        from pantheraml.gpu_trainers import DataParallelTrainer, DistributedDataParallelTrainer

        config = self.config or self.detect_gpu_configuration()
        by_ranks = config.distributed_training if distributed is None else distributed
        config = config.model_copy(update={"distributed_training": by_ranks})
        trainer = (DistributedDataParallelTrainer if by_ranks else DataParallelTrainer)(config, **options)
        self._trainers.append(trainer)
        return trainer

    def cleanup(self) -> None:
        """Clean up the trainers that it made, and return cached GPU memory to the driver. May be called again."""
        trainers, self._trainers = self._trainers, []
        for trainer in trainers:
            trainer.cleanup()
        if trainers:
            from pantheraml.engine.memory.usage import MemoryManager

            MemoryManager().optimize_memory(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()
