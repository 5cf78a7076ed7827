"""TRL's `SFTTrainer` with our guard, events, gradient aggregation and checkpoints: swap the class, and nothing else.

    trainer = PantheraMLTrainer(model=model, tokenizer=tokenizer, train_dataset=rows, args=SFTConfig(...))
    trainer.train()

It runs in a single process and under `torchrun` or `accelerate launch`. `PantheraMLDistributedTrainer` also relaunches
a plain `python script.py` as one process per GPU. `UnslothTrainer` and `UnslothTrainingArguments` are the names of
Unsloth's scripts, and so is `UnslothVisionDataCollator`. The training loop is TRL's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from pantheraml.base import env, log
from pantheraml.base.errors import CheckpointError, ConfigError, MissingExtraError, error_classes
from pantheraml.base.events import Emit
from pantheraml.devices.probe import probe
from pantheraml.hooks import trainer_checkpoints
from pantheraml.hooks.embedding_rate import set_embedding_rate
from pantheraml.hooks.guard_callback import GuardCallback
from pantheraml.hooks.old_trl_names import prepare_config_arguments, rename_trainer_arguments
from pantheraml.hooks.run_events import RunEvents
from pantheraml.hooks.sft_length import complete_config
from pantheraml.hooks.trainer_aggregation import Aggregation, count_targets, count_tokens
from pantheraml.hooks.trainer_memory import explain_memory
from pantheraml.hooks.trainer_settings import (
    ReplicaCheck,
    check_supported,
    configure_ddp,
    say_if_rows_repeat,
    set_checkpointing,
)
from pantheraml.multigpu import start_ranks
from pantheraml.parallel.device_map import is_split
from pantheraml.parallel.json_gather import broadcast_json
from pantheraml.runs.telemetry import RunTelemetry
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode

try:
    from trl import SFTConfig, SFTTrainer
except ImportError as err:
    raise MissingExtraError("pantheraml.trainer needs TRL.", fix="pip install 'trl>=1.15'") from err

if TYPE_CHECKING:
    from pantheraml.data.vision_collator import UnslothVisionDataCollator

__all__ = [
    "PantheraMLDistributedTrainer",
    "PantheraMLTrainer",
    "UnslothTrainer",
    "UnslothTrainingArguments",
    "UnslothVisionDataCollator",
]

logger = log.get(__name__)


class PantheraMLTrainer(SFTTrainer):  # type: ignore[misc]  # TRL is not typed
    """`SFTTrainer` with more arguments; those of `SFTTrainer` mean the same.

    `tokenizer`: another name of `processing_class`. `multi_gpu_config`: gradient aggregation, DDP options and the
    watchdog's timeout. A `GuardCallback` in `callbacks` replaces the default one, which stops at NaN.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *rest: Any,
        tokenizer: Any = None,
        multi_gpu_config: MultiGPUConfig | None = None,
        **others: Any,
    ) -> None:
        log.start_for_scripts()
        config = self._gpus = MultiGPUConfig() if multi_gpu_config is None else multi_gpu_config
        if not isinstance(config, MultiGPUConfig):
            raise ConfigError(
                f"multi_gpu_config is a {type(config).__name__}.", fix="Pass a MultiGPUConfig, as in docs/trainers.md."
            )
        self.own_aggregation = Aggregation(config)
        check_supported(config, ranks=env.process_rank().world_size)
        self._launch(config, model)
        if tokenizer is not None:
            _use_tokenizer(others, tokenizer)
        moved = rename_trainer_arguments(others)
        if moved and not isinstance(args, SFTConfig):
            raise ConfigError(f"{', '.join(moved)} are arguments of SFTConfig.", fix="Pass args=SFTConfig(...).")
        if moved:
            complete_config(args, None, moved)
        set_checkpointing(config, args)
        super().__init__(model, args, *rest, **others)
        if config.aggregation != "mean" and not self.args.average_tokens_across_devices:
            raise ConfigError(
                f"aggregation={config.aggregation!r} needs average_tokens_across_devices.",
                fix="Remove average_tokens_across_devices=False.",
            )
        configure_ddp(config, self.args, self.model, self.accelerator.ddp_handler)
        self._events = self._attach(config)

    def _launch(self, config: MultiGPUConfig, model: Any) -> None:
        """Leave the processes as they are."""

    def _attach(self, config: MultiGPUConfig) -> RunEvents:
        """Add our callbacks."""
        guard = _own(self.callback_handler.callbacks, GuardCallback)
        reason = _why_no_guard(self.args)
        if guard is None and reason is None:
            guard = GuardCallback()
            self.add_callback(guard)
        elif guard is None:
            logger.warning("bad steps are not noticed: the guard does not support %s", reason)
        if config.check_every and reason is None:
            self.add_callback(ReplicaCheck(config.check_every))
        events = RunEvents(
            guard,
            timeout_seconds=min(config.timeout_seconds, self.args.ddp_timeout),
            per_rank=config.enable_multi_gpu_monitoring,
            telemetry=self._sample if config.enable_multi_gpu_monitoring else None,
        )
        self.add_callback(events)
        return events

    def _sample(self, emit: Emit) -> RunTelemetry:
        """Sample the GPUs of this node that the training uses."""
        place, device = env.process_rank(), self.args.device
        if device.type != "cuda":
            return RunTelemetry((), emit)
        several = place.world_size > 1 or is_split(self.model)
        count = torch.cuda.device_count()
        if place.world_size > 1:
            count = min(count, place.local_world_size or place.world_size)
        gpus = probe().gpus  # in torch's order, each with the driver's number: CUDA_VISIBLE_DEVICES may hide others
        used = gpus[:count] if several else gpus[device.index or 0 :][:1]
        return RunTelemetry([gpu.index for gpu in used], emit)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train. `resume_from_checkpoint`: True for the newest whole checkpoint of `output_dir`, or a folder."""
        with self._events.recording(self.args), explain_memory(self.args):
            say_if_rows_repeat(self.args, self.train_dataset)
            checkpoint = self._whole_checkpoint(resume_from_checkpoint)
            return super().train(checkpoint, trial, ignore_keys_for_eval)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        self._events.count(count_tokens(inputs), count_targets(inputs))
        self.own_aggregation.before_backward(model, inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            left_out = self.own_aggregation.after_last_backward(num_items_in_batch, self.args.world_size)
            if left_out:
                self._events.left_out(self.state.global_step + 1, left_out)
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        is_new = self.optimizer is None
        optimizer: Optimizer = super().create_optimizer(*args, **kwargs)
        rate = getattr(self.args, "embedding_learning_rate", None)
        if is_new and rate is not None:
            set_embedding_rate(optimizer, self.model, rate)
        return optimizer

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        self._events.saving()
        if self.args.should_save:
            trainer_checkpoints.begin(folder)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every rank writes its RNG state
        if self.args.should_save:
            trainer_checkpoints.commit(folder, self.args)
        self._events.saved(step, folder, best=self.state.best_model_checkpoint == str(folder))

    def _whole_checkpoint(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, as rank 0 finds it. A collective."""
        if not wanted:
            return None
        found: dict[str, Any] = {}
        if self.is_world_process_zero():
            try:
                found["path"] = trainer_checkpoints.find(wanted, Path(self.args.output_dir))
            except CheckpointError as err:
                found = {"error": type(err).__name__, "what": err.what, "where": err.where, "fix": err.fix}
        if self.args.world_size > 1:
            found = broadcast_json(found)
        if "error" in found:
            raise error_classes()[found["error"]](found["what"], where=found["where"], fix=found["fix"])
        answer = found["path"]
        logger.info("resuming from %s", answer)
        trainer_checkpoints.warn_of_changes(Path(answer), self.args)
        return str(answer)


class PantheraMLDistributedTrainer(PantheraMLTrainer):
    """The same, on every GPU: a script that was started as one process is relaunched as one per GPU.

    The script starts again from its beginning, so create the trainer early, or pass `enable_multi_gpu=True` to
    `FastLanguageModel.from_pretrained`, which relaunches before the model is loaded.
    """

    def _launch(self, config: MultiGPUConfig, model: Any) -> None:
        if isinstance(model, nn.Module) and is_split(model):
            logger.info("the model's layers are on several devices of this process, which continues as one process")
        elif config.mode is not MultiGPUMode.NONE:
            start_ranks(config.world_size, strict=config.strict)


class UnslothTrainer(PantheraMLTrainer):
    """`PantheraMLTrainer` by the name that Unsloth's scripts use."""


@dataclass(init=False)
class UnslothTrainingArguments(SFTConfig):  # type: ignore[misc]
    """`SFTConfig`, and a learning rate of embeddings."""

    embedding_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of embed_tokens, lm_head and modules_to_save."}
    )

    def __init__(self, *args: Any, embedding_learning_rate: float | None = None, **kwargs: Any) -> None:
        if embedding_learning_rate is not None and not embedding_learning_rate >= 0:
            raise ConfigError(f"embedding_learning_rate={embedding_learning_rate} is negative.", fix="Set 0 or more.")
        prepare_config_arguments(kwargs)
        self.embedding_learning_rate = embedding_learning_rate
        super().__init__(*args, **kwargs)


def _use_tokenizer(arguments: dict[str, Any], tokenizer: Any) -> None:
    known = arguments.setdefault("processing_class", tokenizer)
    if known is not tokenizer:
        raise ConfigError("The trainer got a tokenizer and another processing_class.", fix="Pass one of them.")


def _own(callbacks: list[TrainerCallback], kind: type[GuardCallback]) -> GuardCallback | None:
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _why_no_guard(args: Any) -> str | None:
    if args.fp16:
        return "an fp16 loss scale; use bf16"
    return "DeepSpeed and FSDP" if args.deepspeed or args.fsdp else None


def __getattr__(name: str) -> Any:
    """Import `UnslothVisionDataCollator` on first use: it needs Pillow."""
    if name != "UnslothVisionDataCollator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pantheraml.data.vision_collator import UnslothVisionDataCollator
    except ModuleNotFoundError as err:
        if err.name != "PIL":
            raise
        raise MissingExtraError(
            "UnslothVisionDataCollator needs Pillow, which is not installed.", fix="pip install 'pantheraml[vision]'"
        ) from err
    return UnslothVisionDataCollator
