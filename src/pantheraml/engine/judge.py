"""Judge: takes the decision on each step of a run, and tells of those that were not in order.

A bad step is first run once more, from the same weights, samples and random numbers. If it is in order then, the fault
was transient (a bit that flipped, a race): the second gradient is taken, and the run ends as if nothing had been. If it
is bad again the fault is in the model or the data: it is looked for, written down, and met as the policy says. Under
fp16 it may also be the loss scale's, which is lowered first: no samples are lost to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pantheraml.base.events import Emit
from pantheraml.engine.feed import StepBatches
from pantheraml.engine.guard.incident import Finding, culprit, failed_operation, investigate, write_incident
from pantheraml.engine.guard.verdict import Verdict, worst_gradient
from pantheraml.engine.step import Stepper, StepReport
from pantheraml.engine.step_state import keep_step_state
from pantheraml.specs.run_dir import RunDir

PASSED = "the fault was transient: nothing was wrong when the step was run again"


class Judge:
    def __init__(
        self, stepper: Stepper, run: RunDir, emit: Emit, *, about: Mapping[str, Any], keeps: bool, debug: bool = False
    ) -> None:
        """`about`: what incidents say of the run. `keeps`: what a bad step began from is kept beside its incident.
        `debug`: the operation that gave NaN is looked for."""
        self._stepper, self._run, self._emit, self._about = stepper, run, emit, about
        self._keeps, self._debug = keeps, debug
        self.incident: str | None = None
        """What was found out about the last step that was not finite."""

    def judge(
        self, step: int, batches: StepBatches, report: StepReport, *, checkpoint: int | None
    ) -> tuple[Verdict, StepReport]:
        """The verdict on the passes that were just run, and the report it goes by. A collective.

        `checkpoint`: the step of the newest one.
        """
        verdict, report = self._decide(step, batches, report, checkpoint)
        groups = self._stepper.guard.groups.at(step)
        if groups is not None:
            self._emit("train.groups", step=step, groups=groups)
        return verdict, report

    def _decide(
        self, step: int, batches: StepBatches, report: StepReport, checkpoint: int | None
    ) -> tuple[Verdict, StepReport]:
        policy, scale = self._stepper.guard.policy, self._stepper.loss_scale
        first, before = policy.look(report.numbers, loss_scale=scale), policy.last_anomaly
        if first.anomaly is None:
            return policy.decide(report.numbers, loss_scale=scale), report
        # Bad ones in a row have most likely the same cause, which is known by then.
        if first.anomaly == before:
            verdict = policy.decide(report.numbers, loss_scale=scale)
            self._report(step, verdict, report, batches, transient=None)
            return verdict, report
        tensor = worst_gradient(self._stepper.parts, first.anomaly)
        again = self._stepper.backward_again(batches, report)
        lowered = policy.look(again.numbers, loss_scale=scale).anomaly == "overflow"
        if lowered:
            again = self._with_smaller_scale(step, batches, again)
        verdict = policy.decide(again.numbers, loss_scale=self._stepper.loss_scale)
        if verdict.anomaly is None and lowered:
            return verdict, again
        about = {
            **self._about,
            "checkpoint": checkpoint,
            "first_numbers": asdict(report.numbers),
            "first_tensor": tensor,
        }
        if verdict.anomaly is None:
            retried = Verdict("retry", first.cause, first.anomaly)
            self._report(step, retried, report, batches, transient=True, tensor=tensor)
            self._record(step, retried, again, batches, [], about)
            return verdict, again
        self._report(step, verdict, again, batches, transient=False)
        if verdict.anomaly in ("nonfinite", "left_out"):
            about["operation"] = failed_operation(self._stepper, batches) if self._debug else None
            self._record(step, verdict, again, batches, investigate(self._stepper, batches), about)
            if lowered:  # in vain
                assert scale is not None
                self._stepper.set_loss_scale(scale)
        return verdict, again

    def _with_smaller_scale(self, step: int, batches: StepBatches, report: StepReport) -> StepReport:
        """Run the passes again until gradients are finite, or fp16's loss scale is 1. The scale falls ever faster: by
        2, 4, 16 ... where one step down is enough, as it mostly is, little range is given away."""
        stepper, factor = self._stepper, 2.0
        while True:
            verdict = stepper.guard.policy.look(report.numbers, loss_scale=stepper.loss_scale)
            if verdict.anomaly != "overflow":
                return report
            assert stepper.loss_scale is not None
            smaller = max(1.0, stepper.loss_scale / factor)
            retried = replace(verdict, cause=f"{verdict.cause}; the step is run again with {smaller:g}")
            self._report(step, retried, report, batches, transient=False)
            stepper.set_loss_scale(smaller)
            report, factor = stepper.backward_again(batches, report), factor**2

    def _report(
        self,
        step: int,
        verdict: Verdict,
        report: StepReport,
        batches: StepBatches,
        *,
        transient: bool | None,
        tensor: str | None = None,
    ) -> None:
        self._emit(
            "verdict",
            step=step,
            action=verdict.action,
            cause=verdict.cause,
            anomaly=verdict.anomaly,
            transient=transient,
            ranks=[*report.numbers.bad_ranks, *report.numbers.left_out],
            tensor=tensor or worst_gradient(self._stepper.parts, verdict.anomaly),
            samples=batches.sample_ids.tolist(),
        )

    def _record(
        self,
        step: int,
        verdict: Verdict,
        report: StepReport,
        batches: StepBatches,
        findings: list[Finding],
        about: Mapping[str, Any],
    ) -> None:
        """Write down what is known about a bad step."""
        first = culprit(findings)
        path = self._run.incidents / f"step-{step}.json"
        transient = verdict.action == "retry"
        none_found = PASSED if transient else "nothing was found when the step was watched"
        finding = none_found if first is None else str(first)
        self.incident = f"{finding}; see {path}"
        kept = path.with_suffix(".safetensors")
        if self._keeps:
            keep_step_state(kept, self._stepper)
        if not self._stepper.world.is_main:
            return
        context = {
            "verdict": asdict(verdict),
            "persistent": not transient,
            "numbers": asdict(report.numbers),
            "samples": batches.sample_ids.tolist(),
            "micro_batch_size": max(map(len, batches.own_samples), default=1),
            "kept": kept.name if self._keeps else None,
            **about,
        }
        write_incident(path, step, findings, context)
        self._emit(
            "incident",
            step=step,
            path=str(path.relative_to(self._run.path)),
            finding=finding,
            transient=transient,
            rank=first and first.rank,
            module=first and first.module,
            tensor=first.tensor if first else about["first_tensor"],
            samples=first and first.samples,
        )
