"""Training loop: steps, evaluation, checkpoints, and how a run ends.

All output is events; everything that a resumed run needs is in a checkpoint.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from pantheraml.base.errors import DamagedCheckpointError, NonFiniteError, TrainingError
from pantheraml.base.event_stream import FILE_NAME
from pantheraml.base.events import Notice, RanksLeftOut, TrainFinished, TrainStarted, WarningIssued
from pantheraml.checkpoint.store import Checkpoint, CheckpointStore
from pantheraml.engine.evaluate import evaluate
from pantheraml.engine.guard.decide import StepJudge
from pantheraml.engine.guard.policy import Verdict, first_nonfinite
from pantheraml.engine.job import Job, run_length
from pantheraml.engine.memory.headroom import COMPARED_AFTER, MemoryTrend, compare_with_plan, forget_peak
from pantheraml.engine.memory.oom import explain_out_of_memory, pass_too_large
from pantheraml.engine.memory.usage import max_reserved_bytes
from pantheraml.engine.optim.schedule import learning_rate
from pantheraml.engine.state.capture import (
    RunProgress,
    capture,
    identity_changes,
    library_versions,
    load_weights,
    restore,
)
from pantheraml.engine.state.saving import Saver, load_intact, newest_intact
from pantheraml.engine.step.feed import Feed, StepBatches
from pantheraml.engine.step.step_events import StepEvents
from pantheraml.engine.step.step_report import StepReport
from pantheraml.parallel.shard_batch import AdaptiveShares
from pantheraml.planner.no_effect import long_warmup
from pantheraml.planner.out_of_memory import leaner_resume
from pantheraml.specs.plan import Plan
from pantheraml.specs.resume import reproducibility_settings
from pantheraml.specs.run_dir import RunDir

StoppedBy = Literal["end", "early_stopping", "request"]


class TrainingLoop:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = CheckpointStore(RunDir(job.run_dir).checkpoints)
        self.length = run_length(job.config, len(job.train_data))
        self.progress = RunProgress()
        self._saver = Saver(self.store, job.config.checkpoint, job.stepper.world, job.emit)
        self._saved: int | None = None
        """Step of the newest checkpoint, which may still be being written; known on all ranks."""
        about = {
            "identity": job.identity,
            "dims": job.plan.dims.model_dump(),
            "precision": job.plan.precision,
        }
        self._judge = StepJudge(
            job.stepper,
            RunDir(job.run_dir),
            job.emit,
            about=about,
            keeps=job.config.method.kind != "full",
            debug=job.config.stability.debug,
            origins=job.origins,
        )
        self._steps = StepEvents(
            job.emit,
            every=job.config.train.log_every_steps,
            batch=job.config.train.global_batch_size,
            samples=len(job.train_data),
            last=self.length.samples,
            ranks=job.config.parallel.enable_multi_gpu_monitoring,
        )
        self._watch = job.watch
        self._memory, self._first_step = MemoryTrend(), 0
        parallel, ranks = job.config.parallel, job.plan.dims.data
        adapts = parallel.batch_shares == "adaptive" and ranks > 1
        self._adaptive = AdaptiveShares(ranks, global_batch=job.config.train.global_batch_size) if adapts else None

    def resume(self) -> None:
        """Resume from the newest intact checkpoint, if there is one."""
        checkpoint = newest_intact(self.store, self.job.stepper.world, self.job.emit)
        if checkpoint is not None:
            allowed = self.job.config.checkpoint.allow_change
            self.progress = restore(self.job.stepper, checkpoint, self.job.identity, allowed=allowed)
            self._saved = self.progress.step
            settings = reproducibility_settings(self.job.config)  # the command line has reported these
            for change in identity_changes(checkpoint, self.job.identity):
                if change.key in settings:
                    continue
                self.job.emit(WarningIssued(message=f"resuming although {change}, as allowed by --allow-change"))
            for name, here in library_versions().items() - checkpoint.state["versions"].items():
                was = checkpoint.state["versions"].get(name)
                self.job.emit(Notice(message=f"{name} was {was}, is {here}: the last digits of numbers may differ"))
            if self._adaptive is not None and self.progress.shares is not None:
                self._adaptive.from_state(self.progress.shares)

    def run(self) -> StoppedBy:
        job, total, self._first_step = self.job, self.length.steps, self.progress.step
        if job.plan.fits is not None:
            self.progress.micro_batch = min(job.plan.fits, self.progress.micro_batch or job.plan.fits)
        job.emit(
            TrainStarted(
                first_step=self.progress.step + 1,
                total_steps=total,
                world_size=job.plan.world_size,
                device=job.plan.device,
                global_batch_size=job.config.train.global_batch_size,
            )
        )
        if (message := long_warmup(job.config.train, total)) is not None:
            job.emit(WarningIssued(message=message))
        job.stepper.model.train()
        with self._saver, self._heartbeats():
            leaner = partial(self._resume_hint, leaner_resume(job.plan))
            with explain_out_of_memory(job.stepper, job.config, self._plan_in_use, leaner):
                self._save_initial()
                stopped_by = self._take_steps()
            self._steps.flush()
            if stopped_by != "request" and job.eval_data is not None and not self._eval_is_due():
                self._evaluate()
            if self.progress.step != self._saved:
                self._save()
        job.stepper.world.wait_for_main()
        self._use_best_weights(stopped_by)
        # a stopped run has not ended yet, so its final loss means little
        concern = None if stopped_by == "request" else job.stepper.guard.policy.trend.concern()
        orphaned = stopped_by == "request" and job.stop.lost_parent
        cause = "the end of its parent process" if orphaned else stopped_by
        reserved = max_reserved_bytes(job.stepper.world.device)
        job.emit(TrainFinished(steps=self.progress.step, stopped_by=cause, concern=concern, reserved_bytes=reserved))
        return stopped_by

    def _plan_in_use(self) -> Plan:
        """The plan with the micro-batch size currently in use."""
        plan = self.job.plan
        return plan.model_copy(update={"micro_batch_size": self.progress.micro_batch or plan.micro_batch_size})

    @contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """Beat on every forward pass, of which a step may have many. (Not every pipeline stage has embeddings.)"""
        self._watch.beat(self.progress.step)
        with ExitStack() as hooks:
            hooks.callback(self._watch.expect_long_work)  # the last checkpoint may still be being written
            if self.job.plan.dims.pipeline == 1:
                embedding: Any = self.job.stepper.model.get_input_embeddings()  # type: ignore[operator]
                handle = embedding.register_forward_pre_hook(lambda module, args: self._watch.beat())
                hooks.callback(handle.remove)
            yield

    def _take_steps(self) -> StoppedBy:
        with self._feed() as feed, self._steps.emitting():
            if self._evaluation_is_pending() and self._evaluate_and_save():
                return "request"
            while self.progress.step < self.length.steps:
                if self._patience_exhausted():
                    return "early_stopping"
                self._watch.beat(self.progress.step)
                stop = self._step(feed)
                if stop and self.progress.step < self.length.steps:
                    return "request"
                if self._evaluate_and_save():
                    return "request"
        return "end"

    def _feed(self) -> Feed:
        train, plan = self.job.config.train, self.job.plan
        return Feed(
            self.job.train_data,
            self.job.stepper.world,
            seed=train.seed,
            global_batch=train.global_batch_size,
            micro_batch=self.progress.micro_batch or plan.micro_batch_size,
            limit=self.length.samples,
            weights_at=self._weights_at,
        )

    def _weights_at(self, step: int) -> Sequence[float] | None:
        """Relative batch shares of the data ranks at a step; None: equal."""
        if self._adaptive is not None:
            return self._adaptive.weights_at(step)
        shares = self.job.config.parallel.batch_shares
        return shares if isinstance(shares, list) else None

    # One step ---------------------------------------------------------------------------------------------------------

    def _step(self, feed: Feed) -> bool:
        """Run one step, applied or skipped; return whether some rank was asked to stop."""
        begin = time.perf_counter()
        job, stepper, step = self.job, self.job.stepper, self.progress.step
        batches, report = self._backward(feed)
        verdict, report = self._judge.judge(step + 1, batches, report, checkpoint=self._saved)
        rate = self._rate(step, verdict.rate_factor)
        if verdict.action == "stop":
            self._stop_with_error(verdict)
        if report.numbers.left_out:
            job.emit(RanksLeftOut(step=step + 1, ranks=list(report.numbers.left_out)))
        if self._adaptive is not None:
            self._adaptive.observe(step, report.rank_tokens, report.rank_seconds)
        if verdict.action in ("skip", "roll_back"):
            stepper.skip()
            if verdict.action == "roll_back":
                self._roll_back(verdict)
        else:
            stepper.check_replicas(step + 1)
            stepper.apply(report.numbers, rate, zero_nonfinite=verdict.action == "zero")
        self.progress.step += 1
        self._steps.count(self.progress.step, report, rate, time.perf_counter() - begin)
        self._mind_memory(feed, report)
        return report.numbers.stop_requested

    def _backward(self, feed: Feed) -> tuple[StepBatches, StepReport]:
        """Forward and backward of the next step.

        After an out-of-memory error, retry with smaller micro-batches, which give the same gradient. If other ranks are
        waiting in a collective of the pass, all of them have to exit instead.
        """
        job, stepper = self.job, self.job.stepper
        while True:
            batches = feed.take(self.progress.step)
            # Without a CUDA graph the host is busy launching while the device runs: do its other work first.
            free = stepper.is_captured and job.faults is None
            stop = None if free else self._overlapped_work(feed)
            try:
                with nullcontext() if job.faults is None else job.faults.during(self.progress.step + 1):
                    begun = stepper.begin(batches, group_norms=stepper.guard.groups.due(self.progress.step + 1))
                    if stop is None:
                        stop = self._overlapped_work(feed)
                        self._prefetch_to_device(feed)
                    report = stepper.finish(begun, stop_requested=stop)
                self._follow_peers(report, feed)
                return batches, report
            except torch.OutOfMemoryError as err:
                if feed.micro_batch == 1:
                    raise
                if stepper.world.size > 1 and stepper.passes.uses_collectives:
                    raise pass_too_large(err, stepper, job.config, job.plan, sequences=feed.micro_batch) from err
            # outside of the handler, where the exception still references the activations of the pass
            self._steps.emit_due()
            stepper.forget_step()
            stepper.rng.restore()
            before = feed.micro_batch
            feed.use_micro_batch((before + 1) // 2)
            self.progress.micro_batch = feed.micro_batch
            self.job.emit(
                WarningIssued(
                    message=f"step {self.progress.step + 1} ran out of memory with {before} sequences at a time and is"
                    f" retried with {feed.micro_batch}; the global batch, and so the result, is unchanged",
                )
            )

    def _mind_memory(self, feed: Feed, report: StepReport) -> None:
        """Compare memory with the plan once, and act before it ends: with smaller micro-batches, else a checkpoint."""
        job, stepper, step, size = self.job, self.job.stepper, self.progress.step, feed.micro_batch
        if step == self._first_step + COMPARED_AFTER:
            found = compare_with_plan(job.plan, stepper.world.device, step=step, allocated=report.memory_bytes)
            if found is not None:
                job.emit(found)
        left = self._memory.add(step, report.memory_left)
        if left is None:
            return
        self._steps.flush()  # it has the peak, which is forgotten below
        ends = f"memory that is left on a GPU falls, and would end in about {left} steps"
        if size > 1 and stepper.may_pass_more:
            stepper.forget_step()
            feed.use_micro_batch((size + 1) // 2)
            self.progress.micro_batch = feed.micro_batch
            forget_peak(stepper.world.device)
            message = f"{ends}: {feed.micro_batch} sequences at a time from now on instead of {size}; the global batch,"
            job.emit(WarningIssued(message=f"{message} and so the result, is unchanged"))
            return
        if step != self._saved:
            self._save()
        job.emit(WarningIssued(message=f"{ends}; {self._resume_hint(leaner_resume(job.plan))}"))

    def _overlapped_work(self, feed: Feed) -> bool:
        """Do host work that can overlap with the device (logging, checkpoint polling, prefetching).

        Return whether this rank was asked to stop.
        """
        self._steps.emit_due()
        self._saver.poll()
        feed.prefetch(self.progress.step + 1)
        return self.job.stop.is_raised()

    def _prefetch_to_device(self, feed: Feed) -> None:
        """Copy the next batch and the learning rate to the device while it still runs the current passes."""
        stepper, step = self.job.stepper, self.progress.step
        batches = feed.prefetched(until=stepper.has_finished)
        if batches is not None:
            stepper.expect(batches, self._rate(step, stepper.guard.policy.rate_factor))

    def _rate(self, step: int, factor: float) -> float:
        return learning_rate(self.job.config.train, step, self.length.steps) * factor

    def _follow_peers(self, report: StepReport, feed: Feed) -> None:
        """Adopt the smallest micro-batch size that some rank had to fall back to."""
        fewest = report.max_sequences
        if fewest is not None and fewest < feed.micro_batch:
            feed.use_micro_batch(fewest)
            self.progress.micro_batch = fewest
            self.job.emit(
                WarningIssued(
                    message=f"some rank ran out of memory in step {self.progress.step + 1} and retried it with {fewest}"
                    " sequences at a time; all ranks do so from now on, and the global batch, and so the result, is"
                    " unchanged",
                )
            )

    def _roll_back(self, verdict: Verdict) -> None:
        """Continue after the bad step with weights and optimizer state of an older checkpoint. A collective."""
        job, progress, policy = self.job, self.progress, self.job.stepper.guard.policy
        latest, bad = progress.step - job.config.stability.rollback_steps, progress.step + 1
        self._watch.expect_long_work()
        self._saver.finish()
        job.stepper.world.wait_for_main()
        checkpoint = newest_intact(
            self.store,
            job.stepper.world,
            job.emit,
            eligible=lambda step: step <= latest and not any(to < step < at for to, at in progress.undone),
        )
        if checkpoint is None:
            self._stop_with_error(
                replace(verdict, cause=f"{verdict.cause}, and no checkpoint is old enough to roll back to")
            )
        else:
            decided = policy.to_state()
            restore(job.stepper, checkpoint, job.identity, allowed=job.config.checkpoint.allow_change)
            policy.from_state(decided)  # past decisions still count
            progress.undone.append((checkpoint.step, bad))
            message = f"rolled back to the weights of step {checkpoint.step}; samples up to step {bad} are not repeated"
            job.emit(WarningIssued(message=message))

    def _stop_with_error(self, verdict: Verdict) -> None:
        """Save the weights and RNG state from before the bad step, then end the run with an error."""
        self.job.stepper.clear_gradients()
        self.job.stepper.rng.restore()
        if self.progress.step > 0 and self.progress.step != self._saved:
            self._save()
        what = f"Training stopped at step {self.progress.step + 1}: {verdict.cause}."
        if verdict.anomaly in ("spike", "jump"):
            advice = "Lower train.learning_rate or train.max_grad_norm in a new run."
            resume_hint = self._resume_hint("stability.on_spike=skip")
            raise TrainingError(what, where=self._judge.incident, fix=f"{advice} {resume_hint}")
        raise self._nonfinite_error(what)

    def _nonfinite_error(self, what: str) -> NonFiniteError:
        wider = {"fp16": " or use model.precision=bf16 or fp32", "bf16": " or use model.precision=fp32", "fp32": ""}
        return NonFiniteError(
            what,
            where=self._judge.incident
            or f"the `verdict` events of {self.job.run_dir / FILE_NAME} name samples and tensors",
            fix="Inspect the samples of that step; in a new run, lower train.learning_rate"
            f"{wider[self.job.plan.precision]}; if it was the first step, check that the model's weights are finite."
            f" {self._resume_hint('stability.on_nonfinite=skip')}",
        )

    def _resume_hint(self, changes: str) -> str:
        """Sentence on how to resume with changed settings."""
        if self._saved is None:
            return f"There is no checkpoint yet; start over with --set {changes}."
        folder = shlex.quote(str(self.job.run_dir))
        return f"`pantheraml resume {folder} --set {changes}` continues from step {self._saved}."

    # Between steps ----------------------------------------------------------------------------------------------------

    def _eval_is_due(self) -> bool:
        every = self.job.config.train.eval_every_steps
        return every is not None and self.progress.step % every == 0

    def _evaluation_is_pending(self) -> bool:
        """Whether the run was stopped before an evaluation that was due had finished."""
        step = self.progress.step
        return self.job.eval_data is not None and step > 0 and self._eval_is_due() and self.progress.evaluated != step

    def _patience_exhausted(self) -> bool:
        patience = self.job.config.train.early_stopping_patience
        return patience is not None and self.progress.evals_without_gain >= patience

    def _evaluate_and_save(self) -> bool:
        """Evaluate and save if due; return whether a rank was asked to stop while evaluating."""
        self._watch.beat()
        stopped = is_best = False
        if self.job.eval_data is not None and self._eval_is_due():
            stopped, is_best = self._evaluate()
        every = self.job.config.checkpoint.every_steps
        if is_best or (every is not None and self.progress.step % every == 0):
            self._save()
        return stopped

    def _stop_requested(self) -> bool:
        """Check the stop flag during long work, which counts as progress."""
        self._watch.beat()
        return self.job.stop.is_raised()

    def _evaluate(self) -> tuple[bool, bool]:
        """Return whether it was interrupted by a stop request, and whether it is the best so far."""
        assert self.job.eval_data is not None
        self._steps.emit_due()
        result = evaluate(
            self.job.stepper,
            self.job.eval_data,
            micro_batch=self.progress.micro_batch or self.job.plan.micro_batch_size,
            step=self.progress.step,
            emit=self.job.emit,
            stop_requested=self._stop_requested,
        )
        if result is None:
            return True, False
        self.progress.evaluated = self.progress.step
        best = self.progress.best_eval_loss
        if math.isfinite(result.loss) and (best is None or result.loss < best):
            self.progress.best_eval_loss, self.progress.best_step = result.loss, self.progress.step
            self.progress.evals_without_gain = 0
            return False, True
        self.progress.evals_without_gain += 1
        return False, False

    def _save_initial(self) -> None:
        """Save before the first step if rollbacks are enabled, so that the first steps can be undone."""
        if self._saved is None and self.job.config.stability.rolls_back:
            self._save()

    def _save(self) -> None:
        self._steps.emit_due()
        begin = time.perf_counter()
        self._watch.expect_long_work()
        stepper, step = self.job.stepper, self.progress.step
        self._saver.finish()
        stepper.world.wait_for_main()  # the disk may have taken longer than the collective timeout
        nonfinite = first_nonfinite([(name, part.detach()) for name, part in stepper.parts])
        ranks = stepper.world.gather([float(nonfinite is not None)]).flatten().nonzero().flatten().tolist()
        if ranks:
            first = f"first: {nonfinite}" if nonfinite is not None else f"on rank {ranks[0]}"
            raise self._nonfinite_error(f"After step {step} the weights are not finite ({first}); they are not saved.")
        self.progress.shares = None if self._adaptive is None else self._adaptive.to_state()
        groups, state = capture(stepper, self.progress, self.job.identity, self._saver.copies)
        settings = {"config": self.job.config.to_dict(), "plan": self.job.plan.model_dump(mode="json")}
        self._saver.start(step, groups, {**state, **settings}, best_step=self.progress.best_step, begin=begin)
        self._saved = step

    def _use_best_weights(self, stopped_by: StoppedBy) -> None:
        best = self.progress.best_step
        wants_best = self.job.config.checkpoint.final == "best" and stopped_by != "request"
        if wants_best and best is not None and best != self.progress.step:
            load_weights(self.job.stepper, self._load_best(best))
            self.job.emit(Notice(message=f"the final weights are those of step {best}, the best evaluation"))

    def _load_best(self, step: int) -> Checkpoint:
        try:
            return load_intact(self.store, step, self.job.stepper.world)
        except DamagedCheckpointError as err:
            fix = "To use the last weights, which are saved, resume with --set checkpoint.final=last."
            raise DamagedCheckpointError(err.what, where=err.where, fix=fix) from err
