"""Judge: takes the decision on each step of a run, and tells of those that were not in order.

A bad step is first run once more, from the same weights, samples and random numbers. If it is in order then, the fault
was transient (a bit that flipped, a race): the second gradient is taken, and the run ends as if nothing had been. If it
is bad again the fault is in the model or the data: it is looked for, written down, and met as the policy says. Under
fp16 it may also be the loss scale's, which is lowered first: no samples are lost to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import PantheraError
from pantheraml.base.events import Emit
from pantheraml.data.origin import Origin, Origins, said
from pantheraml.engine.feed import StepBatches
from pantheraml.engine.guard.evidence import Evidence, gather_evidence
from pantheraml.engine.guard.incident import Finding, culprit, investigate, write_incident
from pantheraml.engine.guard.operation import failed_operation
from pantheraml.engine.guard.verdict import Anomaly, Verdict
from pantheraml.engine.step import Stepper
from pantheraml.engine.step_report import StepReport
from pantheraml.engine.step_state import keep_step_state
from pantheraml.specs.run_dir import RunDir

logger = log.get(__name__)

PASSED = "the fault was transient: nothing was wrong when the step was run again"
NOT_FOUND = "nothing was found when the step was watched"


@dataclass(frozen=True)
class _Case:
    """A bad step, on which there is a verdict."""

    step: int
    batches: StepBatches
    verdict: Verdict
    report: StepReport
    """Of the passes that the verdict is on."""
    evidence: Evidence

    @property
    def rank(self) -> int | None:
        """Where a spike shows: the rank with the largest loss. Gradients that grew are everyone's by now."""
        if len(self.evidence.samples) == 1:
            return 0
        losses = [(loss, rank) for rank, loss in enumerate(self.report.rank_losses) if loss is not None]
        return max(losses)[1] if losses and self.verdict.anomaly == "spike" else None

    def __str__(self) -> str:
        """What there is to say of a spike or a jump: all is finite, so no module is to blame."""
        losses, rank = self.report.rank_losses, self.rank
        where = "" if rank is None or losses[rank] is None else f"; the loss is {losses[rank]:.4g} on rank {rank}"
        return f"the largest gradient is that of {self.evidence.tensor}{where}"


class Judge:
    def __init__(
        self,
        stepper: Stepper,
        run: RunDir,
        emit: Emit,
        *,
        about: Mapping[str, Any],
        keeps: bool,
        debug: bool = False,
        origins: Origins | None = None,
    ) -> None:
        """`about`: what incidents say of the run. `keeps`: what a bad step began from is kept beside its incident.
        `debug`: the operation that gave NaN is looked for. `origins` tells where samples came from."""
        self._stepper, self._run, self._emit, self._about = stepper, run, emit, about
        self._origins = origins
        self._keeps, self._debug = keeps, debug
        self.incident: str | None = None
        """What was found out about the last bad step that was looked into."""

    def judge(
        self, step: int, batches: StepBatches, report: StepReport, *, checkpoint: int | None
    ) -> tuple[Verdict, StepReport]:
        """The verdict on the passes that were just run, and the report it goes by. A collective.

        `checkpoint`: the step of the newest one.
        """
        verdict, report = self._decide(step, batches, report, checkpoint)
        if report.groups is not None:
            self._emit("train.groups", step=step, groups=report.groups)
        return verdict, report

    def _decide(
        self, step: int, batches: StepBatches, report: StepReport, checkpoint: int | None
    ) -> tuple[Verdict, StepReport]:
        policy, scale = self._stepper.guard.policy, self._stepper.loss_scale
        first, before = policy.look(report.numbers, loss_scale=scale), policy.last_anomaly
        if first.anomaly is None:
            return policy.settle(first, report.numbers), report
        case = _Case(step, batches, first, report, self._evidence(batches, first.anomaly))
        # Bad ones in a row have most likely the same cause, which is known by then.
        if first.anomaly == before:
            verdict = policy.settle(first, report.numbers)
            self._report(replace(case, verdict=verdict), transient=None)
            return verdict, report
        again = self._stepper.backward_again(batches, report)
        lowered = policy.look(again.numbers, loss_scale=scale).anomaly == "overflow"
        if lowered:
            again = self._with_smaller_scale(step, batches, again)
        verdict = policy.decide(again.numbers, loss_scale=self._stepper.loss_scale)
        if verdict.anomaly is None and lowered:
            return verdict, again
        about = {
            "checkpoint": checkpoint,
            "first_numbers": asdict(report.numbers),
            "first_tensor": case.evidence.tensor,
        }
        if verdict.anomaly is None:
            case = replace(case, verdict=Verdict("retry", first.cause, first.anomaly))
            self._report(case, transient=True)
            self._record(replace(case, report=again), [], about)
        else:
            self._meet(_Case(step, batches, verdict, again, self._evidence(batches, verdict.anomaly)), about)
            if lowered:  # in vain
                assert scale is not None
                self._stepper.set_loss_scale(scale)
        return verdict, again

    def _meet(self, case: _Case, about: Mapping[str, Any]) -> None:
        """Look for the cause of what stays, and tell of it."""
        self._report(case, transient=False)
        findings: list[Finding] = []
        if case.verdict.anomaly in ("nonfinite", "left_out"):
            operation = failed_operation(self._stepper, case.batches) if self._debug else None
            findings, about = investigate(self._stepper, case.batches), {**about, "operation": operation}
        self._record(case, findings, about)

    def _evidence(self, batches: StepBatches, anomaly: Anomaly | None) -> Evidence:
        return gather_evidence(self._stepper.parts, batches, anomaly, self._stepper.world)

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
            evidence = self._evidence(batches, verdict.anomaly)
            self._report(_Case(step, batches, retried, report, evidence), transient=False)
            stepper.set_loss_scale(smaller)
            report, factor = stepper.backward_again(batches, report), factor**2

    def _report(self, case: _Case, *, transient: bool | None) -> None:
        numbers = case.report.numbers
        self._emit(
            "verdict",
            step=case.step,
            action=case.verdict.action,
            cause=case.verdict.cause,
            anomaly=case.verdict.anomaly,
            transient=transient,
            ranks=[*numbers.bad_ranks, *numbers.left_out],
            tensor=case.evidence.tensor,
            samples=case.batches.sample_ids.tolist(),
        )

    def _find_origins(self, samples: Sequence[int], tokens: Sequence[int] | None) -> list[Origin]:
        if self._origins is None or not samples:
            return []
        try:
            return self._origins(samples, tokens)
        except PantheraError as err:  # the tokenizer may be gone by now; what was found is told all the same
            logger.warning("it cannot be told where samples came from: %s", err)
            return []

    def _record(self, case: _Case, findings: list[Finding], about: Mapping[str, Any]) -> None:
        """Write down what is known about a bad step."""
        verdict, first = case.verdict, culprit(findings)
        path = self._run.incidents / f"step-{case.step}.json"
        transient, grown = verdict.action == "retry", verdict.anomaly in ("spike", "jump")
        finding = str(first) if first is not None else PASSED if transient else str(case) if grown else NOT_FOUND
        rank, samples = None, None
        if first is not None:
            rank, samples = first.rank, first.samples
        elif grown and not transient and case.rank is not None:
            rank, samples = case.rank, case.evidence.samples[case.rank]
        origins = self._find_origins(samples or [], None if first is None else first.tokens)
        if origins:
            finding = f"{finding}: {said(origins)}"
        self.incident = f"{finding}; see {path}"
        kept = path.with_suffix(".safetensors")
        # Spikes that are only detected are not bounded in number, and adapters may be large.
        keeps = self._keeps and not (grown and verdict.action == "step")
        if keeps:
            keep_step_state(kept, self._stepper)
        if not self._stepper.world.is_main:
            return
        context = {
            "verdict": asdict(verdict),
            "persistent": not transient,
            "numbers": asdict(case.report.numbers),
            "rank_losses": case.report.rank_losses,
            "tensor": case.evidence.tensor,
            "samples": case.batches.sample_ids.tolist(),
            "origins": [origin.as_dict() for origin in origins],
            "rank_samples": case.evidence.samples,
            "micro_batch_size": max(map(len, case.batches.own_samples), default=1),
            "kept": kept.name if keeps else None,
            **self._about,
            **about,
        }
        write_incident(path, case.step, findings, context)
        self._emit(
            "incident",
            step=case.step,
            path=str(path.relative_to(self._run.path)),
            finding=finding,
            transient=transient,
            rank=rank,
            module=first and first.module,
            tensor=first.tensor if first else case.evidence.tensor,
            samples=samples,
        )
