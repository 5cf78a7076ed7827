"""Decide on each step of a run: rerun, investigate and report bad ones.

    loop -> StepJudge -> Policy      numbers in, verdict out; pure, and the same on all ranks
                      -> Stepper     forward and backward again; knows nothing of verdicts

A bad step is first rerun from the same weights, samples and RNG states. If it is fine then, the fault was transient
(a bit flip, a race): the second gradient is used, and the run ends as if nothing had happened. If it is bad again, the
fault is in the model or the data: it is investigated, recorded, and handled as the policy says. Under fp16 the loss
scale may be the cause; it is lowered first, so that no samples are lost to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import PantheraError
from pantheraml.base.events import Emit, IncidentRecorded, TrainGroups, VerdictReached
from pantheraml.data.origin import Origin, Origins, summarize_origins
from pantheraml.engine.guard.incident import Evidence, Finding, culprit, gather_evidence, investigate, write_incident
from pantheraml.engine.guard.nan_origin import find_nan_operation
from pantheraml.engine.guard.policy import Anomaly, Verdict
from pantheraml.engine.state.step_state import save_step_state
from pantheraml.engine.step.feed import StepBatches
from pantheraml.engine.step.step import Stepper
from pantheraml.engine.step.step_report import StepReport
from pantheraml.specs.run_dir import RunDir

logger = log.get(__name__)

PASSED = "the fault was transient: the rerun step was fine"
NOT_FOUND = "no cause was found when the step was rerun with hooks"


@dataclass(frozen=True)
class _Case:
    """A bad step and its verdict."""

    step: int
    batches: StepBatches
    verdict: Verdict
    report: StepReport
    """Numbers that the verdict is based on."""
    evidence: Evidence

    @property
    def rank(self) -> int | None:
        """Rank with the largest loss, for a spike; gradients are summed over ranks already."""
        if len(self.evidence.samples) == 1:
            return 0
        losses = [(loss, rank) for rank, loss in enumerate(self.report.rank_losses) if loss is not None]
        return max(losses)[1] if losses and self.verdict.anomaly == "spike" else None

    def __str__(self) -> str:
        """Describe a spike or a jump: all values are finite, so no module is to blame."""
        losses, rank = self.report.rank_losses, self.rank
        where = "" if rank is None or losses[rank] is None else f"; the loss is {losses[rank]:.4g} on rank {rank}"
        return f"the largest gradient is that of {self.evidence.tensor}{where}"


class StepJudge:
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
        """`about`: facts about the run for incident files. `keeps`: save the state that a bad step began from.
        `debug`: find the operation that produced NaN. `origins`: maps samples to source files and lines."""
        self._policy = stepper.guard.policy
        self._stepper, self._run, self._emit, self._about = stepper, run, emit, about
        self._origins = origins
        self._keeps, self._debug = keeps, debug
        self.incident: str | None = None
        """Finding of the last investigated step."""

    def judge(
        self, step: int, batches: StepBatches, report: StepReport, *, checkpoint: int | None
    ) -> tuple[Verdict, StepReport]:
        """Return the verdict on the step, and the report that it is based on. A collective.

        `checkpoint`: step of the newest checkpoint.
        """
        verdict, report = self._decide(step, batches, report, checkpoint)
        if report.groups is not None:
            self._emit(TrainGroups(step=step, groups=report.groups))
        return verdict, report

    def _decide(
        self, step: int, batches: StepBatches, report: StepReport, checkpoint: int | None
    ) -> tuple[Verdict, StepReport]:
        policy, scale = self._policy, self._stepper.loss_scale
        first, before = policy.look(report.numbers, loss_scale=scale), policy.last_anomaly
        if first.anomaly is None:
            return policy.settle(first, report.numbers), report
        case = _Case(step, batches, first, report, self._evidence(batches, first.anomaly))
        # Consecutive bad steps most likely have the same cause, which has been investigated.
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
            self._handle_persistent(
                _Case(step, batches, verdict, again, self._evidence(batches, verdict.anomaly)), about
            )
            if lowered:  # it did not help
                assert scale is not None
                self._stepper.set_loss_scale(scale)
        return verdict, again

    def _handle_persistent(self, case: _Case, about: Mapping[str, Any]) -> None:
        """Investigate and record a persistent fault."""
        self._report(case, transient=False)
        findings: list[Finding] = []
        if case.verdict.anomaly in ("nonfinite", "left_out"):
            operation = find_nan_operation(self._stepper, case.batches) if self._debug else None
            findings, about = investigate(self._stepper, case.batches), {**about, "operation": operation}
        self._record(case, findings, about)

    def _evidence(self, batches: StepBatches, anomaly: Anomaly | None) -> Evidence:
        return gather_evidence(self._stepper.parts, batches, anomaly, self._stepper.world)

    def _with_smaller_scale(self, step: int, batches: StepBatches, report: StepReport) -> StepReport:
        """Rerun with a smaller fp16 loss scale until gradients are finite or the scale is 1. It is divided by 2, 4, 16,
        ...: one halving is usually enough, and costs little range."""
        stepper, factor = self._stepper, 2.0
        while True:
            verdict = self._policy.look(report.numbers, loss_scale=stepper.loss_scale)
            if verdict.anomaly != "overflow":
                return report
            assert stepper.loss_scale is not None
            smaller = max(1.0, stepper.loss_scale / factor)
            retried = replace(verdict, cause=f"{verdict.cause}; rerunning the step with {smaller:g}")
            evidence = self._evidence(batches, verdict.anomaly)
            self._report(_Case(step, batches, retried, report, evidence), transient=False)
            stepper.set_loss_scale(smaller)
            report, factor = stepper.backward_again(batches, report), factor**2

    def _report(self, case: _Case, *, transient: bool | None) -> None:
        numbers = case.report.numbers
        self._emit(
            VerdictReached(
                step=case.step,
                action=case.verdict.action,
                cause=case.verdict.cause,
                anomaly=case.verdict.anomaly,
                transient=transient,
                ranks=[*numbers.bad_ranks, *numbers.left_out],
                tensor=case.evidence.tensor,
                samples=case.batches.sample_ids.tolist(),
            )
        )

    def _find_origins(self, samples: Sequence[int], tokens: Sequence[int] | None) -> list[Origin]:
        if self._origins is None or not samples:
            return []
        try:
            return self._origins(samples, tokens)
        except PantheraError as err:  # the tokenizer may be gone by now; report the finding anyway
            logger.warning("the origin of samples is not known: %s", err)
            return []

    def _record(self, case: _Case, findings: list[Finding], about: Mapping[str, Any]) -> None:
        """Write the incident file and emit its event."""
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
            finding = f"{finding}: {summarize_origins(origins)}"
        self.incident = f"{finding}; see {path}"
        kept = path.with_suffix(".safetensors")
        # Spikes that are only detected are unbounded in number, and adapters may be large.
        keeps = self._keeps and not (grown and verdict.action == "step")
        if keeps:
            save_step_state(kept, self._stepper)
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
            IncidentRecorded(
                step=case.step,
                path=str(path.relative_to(self._run.path)),
                finding=finding,
                transient=transient,
                rank=rank,
                module=first.module if first else None,
                tensor=first.tensor if first else case.evidence.tensor,
                samples=samples,
            )
        )
