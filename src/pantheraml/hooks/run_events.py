"""Events of a run by transformers' or TRL's trainer: the same stream that `pantheraml train` writes.

`RunEvents` is a callback. Rank 0 writes `events.jsonl` into the trainer's output folder, from which `run.json` and the
report are made; other ranks write their errors only. `recording` wraps a training, so that a crash is recorded as well.

While it records, a watchdog dumps the stacks of a rank that makes no progress into `stacks/`, and says so.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pantheraml import __version__
from pantheraml.base import env, log
from pantheraml.base.errors import InterruptedRunError, PantheraError, WorkerError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import (
    CheckpointRemoved,
    CheckpointSaved,
    Emit,
    ErrorRaised,
    EvalDone,
    EventBase,
    ModelReady,
    RanksLeftOut,
    RunFallback,
    RunFinished,
    RunStarted,
    TrainFinished,
    TrainRanks,
    TrainStarted,
    TrainStep,
    VerdictReached,
    WarningIssued,
)
from pantheraml.engine.guard.watchdog import StackDumpWatchdog, recorded_collectives
from pantheraml.engine.step.async_readback import AsyncReadback
from pantheraml.hooks.guard_callback import GuardCallback
from pantheraml.hooks.trainer_checkpoints import global_batch_size, saved_steps
from pantheraml.parallel.process_group import World
from pantheraml.readers.summary import write_run_json

logger = log.get(__name__)


class Telemetry(Protocol):
    """Samples in a thread of its own between `__enter__` and `__exit__`; `tick` writes what is due."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def tick(self) -> None: ...


class RunEvents(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes the events of a training; all ranks log at the same steps, which their shared figures rely on."""

    def __init__(
        self,
        guard: GuardCallback | None,
        *,
        timeout_seconds: float,
        per_rank: bool = True,
        telemetry: Callable[[Emit], Telemetry] | None = None,
    ) -> None:
        """`timeout_seconds`: without progress for most of it, stacks are dumped. `per_rank`: write `train.ranks`.
        `telemetry`: samples GPUs and host beside the training, in rank 0."""
        self._guard, self._timeout, self._per_rank = guard, timeout_seconds, per_rank
        self._writer: EventWriter | None = None
        self._watchdog: StackDumpWatchdog | None = None
        self._make_telemetry = telemetry
        self._telemetry: Telemetry | None = None
        self._world = World(rank=0, size=1, device=torch.device("cpu"))
        self._folder = Path()
        self._verdicts_seen = 0
        self._begun = self._last_log = 0.0
        self._counts: torch.Tensor | None = None
        """Tokens and target tokens of this rank so far, on the device."""
        self._counts_read = AsyncReadback(torch.device("cpu"))
        self._logged = [0.0, 0.0]
        """`_counts` as of the last logged step."""
        self._uncounted = False
        """Whether a batch has come since then."""
        self._saving_since = 0.0
        self._checkpoints: dict[int, Path] = {}

    # -- around a training

    @contextmanager
    def recording(self, args: TrainingArguments) -> Iterator[None]:
        """Write the events of the training inside, its end and its error among them."""
        self._begin(args)
        status = "failed"
        try:
            with self._sampling(), self._watching():
                yield
            status = "succeeded"
        except BaseException as err:
            status = "stopped" if isinstance(err, KeyboardInterrupt | InterruptedRunError) else status
            self._report_verdicts()
            if status == "failed":
                self._record_error(err)
            raise
        finally:
            self._emit(RunFinished(status=status, seconds=time.monotonic() - self._begun))
            self._close()

    def _begin(self, args: TrainingArguments) -> None:
        self._folder = Path(args.output_dir)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._world = World(dist.get_rank() if ranks > 1 else 0, ranks, args.device)
        self._begun = self._last_log = time.monotonic()
        self._counts, self._logged, self._counts_read = None, [0.0, 0.0], AsyncReadback(args.device)
        self._uncounted = False
        self._verdicts_seen = 0 if self._guard is None else len(self._guard.verdicts)
        self._checkpoints = saved_steps(self._folder)
        if self._world.is_main:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventWriter(self._folder)
        self._emit(RunStarted(command=" ".join(sys.orig_argv[1:]), pantheraml=__version__, output=str(self._folder)))
        if fallback := env.script_fallback():
            self._emit(RunFallback(message=str(fallback), reason=fallback.reason, planned_world_size=fallback.planned))

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        if self._writer is None or self._make_telemetry is None:
            yield
            return
        self._telemetry = self._make_telemetry(self._emit)
        try:
            with self._telemetry:
                yield
        finally:
            self._telemetry = None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        several = self._world.size > 1
        stacks = self._folder / "stacks"
        with ExitStack() as stack:
            self._watchdog = stack.enter_context(
                StackDumpWatchdog(
                    stacks,
                    rank=self._world.rank,
                    timeout_seconds=self._timeout,
                    collectives=(lambda: recorded_collectives(dist.get_backend())) if several else None,
                    heartbeat=self._emit,
                    on_stuck=self._stuck,
                )
            )
            yield
        self._watchdog = None
        with suppress(OSError):  # not empty: another rank is still at work
            stacks.rmdir()

    def _stuck(self, stacks: Path) -> None:
        """Called in a thread of the watchdog."""
        message = f"rank {self._world.rank} has made no progress for {self._timeout:g} s or nearly; see {stacks}"
        logger.error("%s", message)
        self._emit(WarningIssued(message=message))

    def _record_error(self, err: BaseException) -> None:
        known = err if isinstance(err, PantheraError) else WorkerError(f"{type(err).__name__}: {err}")
        event = ErrorRaised.of(known, traceback="".join(traceback.format_exception(err)))
        with suppress(PantheraError):  # a full disk must not hide the error itself
            if self._writer is not None:
                self._writer(event)
            elif self._folder.is_dir():
                with EventWriter(self._folder, rank=self._world.rank) as writer:
                    writer(event)

    def _close(self) -> None:
        writer, self._writer, self._watchdog = self._writer, None, None
        if writer is not None:
            writer.close()
            write_run_json(self._folder)

    def _emit(self, event: EventBase, /) -> None:
        if self._writer is not None:
            self._writer(event)

    # -- calls by the trainer besides callbacks

    def count(self, tokens: torch.Tensor | int, targets: torch.Tensor | int) -> None:
        """Add a batch of this rank. The sums are copied to the host before its forward, so that logging does not wait
        for the step."""
        device = next((number.device for number in (tokens, targets) if isinstance(number, torch.Tensor)), None)
        added = torch.stack([torch.as_tensor(number, device=device) for number in (tokens, targets)]).double()
        self._counts = added if self._counts is None else self._counts + added
        self._counts_read.send(self._counts)
        self._uncounted = True

    def left_out(self, step: int, ranks: Sequence[int]) -> None:
        """Report ranks whose gradient did not enter the step."""
        logger.warning("step %s: the gradients of ranks %s are not finite and were left out", step, list(ranks))
        self._emit(RanksLeftOut(step=step, ranks=list(ranks)))

    def saving(self) -> None:
        """A checkpoint is being written, which may take long."""
        self._saving_since = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.expect_long_work()

    def saved(self, step: int, folder: Path, *, best: bool) -> None:
        seconds = time.monotonic() - self._saving_since
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self._emit(
            CheckpointSaved(step=step, path=str(folder), bytes=size, seconds=seconds, stall_seconds=seconds, best=best)
        )
        self._checkpoints[step] = folder
        for old in [old for old, path in self._checkpoints.items() if not path.exists()]:
            self._emit(CheckpointRemoved(step=old, path=str(self._checkpoints.pop(old))))
        self._beat(step)

    # -- callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        self._emit(
            ModelReady(
                architecture=type(getattr(model, "get_base_model", lambda: model)()).__name__,
                parameters=sum(count for count, _ in counts),
                trainable_parameters=sum(count for count, trained in counts if trained),
                precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
                seconds=0.0,
            )
        )
        self._emit(
            TrainStarted(
                first_step=state.global_step + 1,
                total_steps=state.max_steps,
                world_size=self._world.size,
                device=self._world.device.type,
                global_batch_size=global_batch_size(args),
            )
        )
        self._last_log = time.monotonic()  # and no beat: the first step may compile, so it may take long

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._beat(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state.global_step)
        self._report_verdicts()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._beat(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self._log_step(state, logs)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = kwargs.get("metrics") or {}
        loss = metrics.get("eval_loss")
        if loss is not None:
            self._emit(
                EvalDone(
                    step=state.global_step,
                    loss=loss,
                    perplexity=math.exp(loss) if loss < 700 else math.inf,
                    target_tokens=None,
                    seconds=metrics.get("eval_runtime", 0.0),
                )
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        done = state.global_step >= state.max_steps
        self._emit(TrainFinished(steps=state.global_step, stopped_by="end" if done else "callback"))

    def _beat(self, step: int) -> None:
        if self._telemetry is not None:
            self._telemetry.tick()
        if self._watchdog is not None:
            self._watchdog.beat(step)

    def _log_step(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """A collective: every rank logs."""
        now = time.monotonic()
        since, self._last_log = self._last_log, now
        total = self._counts_read.read() if self._uncounted else self._logged
        self._uncounted = False
        own = [new - old for new, old in zip(total, self._logged, strict=True)]
        own.append(float(_memory(self._world.device) or -1))
        self._logged = total
        rows = self._world.rows(own)
        tokens, targets = (int(sum(row[column] for row in rows)) for column in (0, 1))
        memory = [None if row[2] < 0 else int(row[2]) for row in rows]
        self._emit(
            TrainStep(
                step=state.global_step,
                epoch=state.epoch or 0.0,
                loss=logs["loss"],
                learning_rate=logs.get("learning_rate"),
                grad_norm=logs.get("grad_norm"),
                tokens=tokens,
                target_tokens=targets,
                seconds=now - since,
                tokens_per_second=tokens / (now - since) if now > since else None,
                memory_bytes=max((size for size in memory if size is not None), default=None),
                aux_loss=logs.get("aux_loss"),
            )
        )
        if self._per_rank and self._world.size > 1:
            self._emit(
                TrainRanks(step=state.global_step, tokens=[row[0] for row in rows], seconds=None, memory_bytes=memory)
            )

    def _report_verdicts(self) -> None:
        if self._guard is None:
            return
        for step, verdict in self._guard.verdicts[self._verdicts_seen :]:
            self._emit(VerdictReached(step=step, action=verdict.action, cause=verdict.cause, anomaly=verdict.anomaly))
        self._verdicts_seen = len(self._guard.verdicts)


def _memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
