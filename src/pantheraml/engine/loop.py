"""The training loop: steps, evaluation, checkpoints, and the ways a run can end.

Everything that a reader may want to know leaves as an event; everything that a resumed run needs is in a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pantheraml.base.errors import NonFiniteError
from pantheraml.base.events import FILE_NAME, Emit
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.evaluate import evaluate
from pantheraml.engine.feed import Feed, StepBatches
from pantheraml.engine.guard.signals import StopFlag
from pantheraml.engine.guard.verdict import StepNumbers, Verdict, decide, first_nonfinite
from pantheraml.engine.out_of_memory import explained_out_of_memory
from pantheraml.engine.schedule import learning_rate
from pantheraml.engine.state import Progress, capture, load_weights, restore
from pantheraml.engine.step import Stepper, StepReport
from pantheraml.parallel.shard_batch import Adaptive
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig

StoppedBy = Literal["end", "early_stopping", "request"]


@dataclass(frozen=True)
class Length:
    """How long a run is: optimizer steps, and (when counted in epochs) the number of samples it ends after."""

    steps: int
    samples: int | None


def run_length(config: TrainConfig, sequences: int) -> Length:
    if config.train.max_steps is not None:
        return Length(steps=config.train.max_steps, samples=None)
    samples = max(1, math.ceil(config.train.epochs * sequences))
    return Length(steps=math.ceil(samples / config.train.global_batch_size), samples=samples)


@dataclass(frozen=True)
class Job:
    """What the loop works on."""

    config: TrainConfig
    plan: Plan
    run_dir: Path
    stepper: Stepper
    train_data: TokenDataset
    eval_data: TokenDataset | None
    model_fingerprint: str
    """Of the weights that training began with."""
    emit: Emit
    stop: StopFlag

    @property
    def identity(self) -> Mapping[str, Any]:
        """What must not change between a checkpoint and its resumption: it makes the samples and the weights."""
        return {
            "model": self.model_fingerprint,
            "data": self.train_data.fingerprint,
            "train.seed": self.config.train.seed,
            "train.global_batch_size": self.config.train.global_batch_size,
            "method": self.config.method.model_dump(mode="json"),
            "train.optimizer": self.config.train.optimizer,
            "train.weights": self.config.train.weights,
        }


@dataclass
class _Work:
    """What was done since the last `train.step` event."""

    tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0

    last: tuple[StepReport, float] | None = None
    """The newest step that no event has told of, and its learning rate."""

    def add(self, report: StepReport, rate: float, seconds: float) -> None:
        self.tokens += report.tokens
        self.target_tokens += report.numbers.target_tokens
        self.seconds += seconds
        self.last = (report, rate)


class TrainingLoop:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = CheckpointStore(RunDir(job.run_dir).checkpoints)
        self.length = run_length(job.config, len(job.train_data))
        self.progress = Progress()
        self._unreported = _Work()
        parallel, ranks = job.config.parallel, job.plan.dims.data
        adapts = parallel.batch_shares == "adaptive" and ranks > 1
        self._adaptive = Adaptive(ranks, global_batch=job.config.train.global_batch_size) if adapts else None

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        steps = self.store.steps()
        if steps:
            self.progress = restore(self.job.stepper, self.store.load(steps[-1]), self.job.identity)
            if self._adaptive is not None and self.progress.shares is not None:
                self._adaptive.from_state(self.progress.shares)

    def run(self) -> StoppedBy:
        job, total = self.job, self.length.steps
        job.emit(
            "train.started",
            first_step=self.progress.step + 1,
            total_steps=total,
            world_size=job.plan.world_size,
            device=job.plan.device,
            global_batch_size=job.config.train.global_batch_size,
        )
        job.stepper.model.train()
        with explained_out_of_memory(job.stepper, job.config, job.plan):
            stopped_by = self._take_steps()
        if self._unreported.last is not None:
            self._report(*self._unreported.last)
        if stopped_by != "request" and job.eval_data is not None and not self._eval_is_due():
            self._evaluate()
        if self.progress.step not in self.store.steps():
            self._save()
        self._use_best_weights(stopped_by)
        job.emit("train.finished", steps=self.progress.step, stopped_by=stopped_by)
        return stopped_by

    def _take_steps(self) -> StoppedBy:
        with self._feed() as feed:
            while self.progress.step < self.length.steps:
                if self._patience_is_out():
                    return "early_stopping"
                stop = self._step(feed.step(self.progress.step))
                stop = stop or self._evaluate_and_save()
                if stop and self.progress.step < self.length.steps:
                    return "request"
        return "end"

    def _feed(self) -> Feed:
        train, plan = self.job.config.train, self.job.plan
        return Feed(
            self.job.train_data,
            self.job.stepper.world,
            seed=train.seed,
            global_batch=train.global_batch_size,
            micro_batch=plan.micro_batch_size,
            limit=self.length.samples,
            weights_at=self._weights_at,
        )

    def _weights_at(self, step: int) -> Sequence[float] | None:
        """How the batch of a step is shared among the data ranks; None is evenly."""
        if self._adaptive is not None:
            return self._adaptive.weights_at(step)
        shares = self.job.config.parallel.batch_shares
        return shares if isinstance(shares, list) else None

    # One step ---------------------------------------------------------------------------------------------------------

    def _step(self, batches: StepBatches) -> bool:
        """Take (or skip) one step; whether some rank was asked to stop."""
        begin = time.perf_counter()
        job, stepper, step = self.job, self.job.stepper, self.progress.step
        rate = learning_rate(job.config.train, step, self.length.steps)
        report = stepper.backward(batches, stop_requested=job.stop.is_raised())
        scale = stepper.scaler.get_scale() if stepper.scaler.is_enabled() else None
        verdict = decide(
            report.numbers,
            job.config.stability,
            skipped_in_a_row=self.progress.skipped_in_a_row,
            loss_scale=scale,
        )
        if verdict.action != "step":
            self._report_verdict(verdict, report.numbers, batches)
        if verdict.action == "stop":
            self._stop_on(verdict)
        if report.left_out:
            job.emit("aggregation.left_out", step=step + 1, ranks=list(report.left_out))
        if self._adaptive is not None:
            self._adaptive.observe(step, report.rank_tokens, report.rank_seconds)
        if verdict.action == "step":
            stepper.check_copies(step + 1)
            stepper.apply(report.numbers, rate)
            self.progress.skipped_in_a_row = 0
        else:
            stepper.skip(report.numbers)
            self.progress.skipped_in_a_row += 1
        self.progress.step += 1
        self._count_step(report, rate, time.perf_counter() - begin)
        return report.numbers.stop_requested

    def _count_step(self, report: StepReport, rate: float, seconds: float) -> None:
        self._unreported.add(report, rate, seconds)
        if self.progress.step % self.job.config.train.log_every_steps == 0:
            self._report(report, rate)

    def _report(self, report: StepReport, rate: float) -> None:
        """Tokens and seconds are those since the last report; loss and gradient norm are the last step's."""
        step, work = self.progress.step, self._unreported
        self._unreported = _Work()
        self.job.emit(
            "train.step",
            step=step,
            epoch=step * self.job.config.train.global_batch_size / len(self.job.train_data),
            loss=report.numbers.loss,
            learning_rate=rate,
            grad_norm=report.numbers.grad_norm,
            tokens=work.tokens,
            target_tokens=work.target_tokens,
            seconds=work.seconds,
            tokens_per_second=work.tokens / work.seconds,
            memory_bytes=report.memory_bytes,
        )

    def _report_verdict(self, verdict: Verdict, numbers: StepNumbers, batches: StepBatches) -> None:
        gradients = [(name, part.grad) for name, part in self.job.stepper.parts if part.grad is not None]
        self.job.emit(
            "verdict",
            step=self.progress.step + 1,
            action=verdict.action,
            cause=verdict.cause,
            ranks=numbers.bad_ranks,
            tensor=first_nonfinite(gradients),
            samples=batches.sample_ids.tolist(),
        )

    def _stop_on(self, verdict: Verdict) -> None:
        """The weights are those before the bad step: save them, then end the run with an error."""
        self.job.stepper.clear_gradients()
        if self.progress.step > 0 and self.progress.step not in self.store.steps():
            self._save()
        raise self._not_finite(f"Training stopped at step {self.progress.step + 1}: {verdict.cause}.")

    def _not_finite(self, what: str) -> NonFiniteError:
        steps = self.store.steps()
        kept = f"`pantheraml resume` continues from step {steps[-1]}." if steps else "There is no checkpoint yet."
        return NonFiniteError(
            what,
            where=f"the `verdict` events of {self.job.run_dir / FILE_NAME} name samples and tensors",
            todo="Lower train.learning_rate, use model.precision=bf16 or fp32, or set stability.on_nonfinite=skip;"
            f" if it was the first step, check that the model's own weights are finite. {kept}",
        )

    # Between steps ----------------------------------------------------------------------------------------------------

    def _eval_is_due(self) -> bool:
        every = self.job.config.train.eval_every_steps
        return every is not None and self.progress.step % every == 0

    def _patience_is_out(self) -> bool:
        patience = self.job.config.train.early_stopping_patience
        return patience is not None and self.progress.evals_without_gain >= patience

    def _evaluate_and_save(self) -> bool:
        """Evaluate and save if it is time; whether a rank was asked to stop while evaluating."""
        stopped = is_best = False
        if self.job.eval_data is not None and self._eval_is_due():
            stopped, is_best = self._evaluate()
        every = self.job.config.checkpoint.every_steps
        if is_best or (every is not None and self.progress.step % every == 0):
            self._save()
        return stopped

    def _evaluate(self) -> tuple[bool, bool]:
        """Whether it was broken off by a request to stop, and whether it is the best evaluation so far."""
        assert self.job.eval_data is not None
        result = evaluate(
            self.job.stepper,
            self.job.eval_data,
            micro_batch=self.job.plan.micro_batch_size,
            step=self.progress.step,
            emit=self.job.emit,
            stop_requested=self.job.stop.is_raised,
        )
        if result is None:
            return True, False
        best = self.progress.best_eval_loss
        if math.isfinite(result.loss) and (best is None or result.loss < best):
            self.progress.best_eval_loss, self.progress.best_step = result.loss, self.progress.step
            self.progress.evals_without_gain = 0
            return False, True
        self.progress.evals_without_gain += 1
        return False, False

    def _save(self) -> None:
        begin = time.perf_counter()
        stepper, step = self.job.stepper, self.progress.step
        broken = first_nonfinite([(name, part.detach()) for name, part in stepper.parts])
        ranks = stepper.world.gather([float(broken is not None)]).flatten().nonzero().flatten().tolist()
        if ranks:
            first = f"first: {broken}" if broken is not None else f"on rank {ranks[0]}"
            raise self._not_finite(f"After step {step} the weights are not finite ({first}); they are not saved.")
        self.progress.shares = None if self._adaptive is None else self._adaptive.to_state()
        tensors, state = capture(stepper, self.progress, self.job.identity)
        if stepper.world.is_main:
            path = self.store.save(step, tensors, state)
            self.job.emit(
                "checkpoint.saved",
                step=step,
                path=str(path.relative_to(self.job.run_dir)),
                bytes=self.store.bytes(step),
                seconds=time.perf_counter() - begin,
                best=self.progress.best_step == step,
            )
            kept = {self.progress.best_step} if self.progress.best_step is not None else set()
            for removed in self.store.prune(keep=self.job.config.checkpoint.keep, also=kept):
                path = self.store.path(removed).relative_to(self.job.run_dir)
                self.job.emit("checkpoint.removed", step=removed, path=str(path))
        stepper.world.wait_for_main()

    def _use_best_weights(self, stopped_by: StoppedBy) -> None:
        best = self.progress.best_step
        wants_best = self.job.config.checkpoint.final == "best" and stopped_by != "request"
        if wants_best and best is not None and best != self.progress.step:
            load_weights(self.job.stepper, self.store.load(best))
            self.job.emit("notice", message=f"the final weights are those of step {best}, the best evaluation")
