"""Incidents: find out where a bad step went wrong and write it to `incidents/step-N.json`.

- `gather_evidence`: the suspect gradient and the samples of every rank, in one exchange that only bad steps pay for.
- `investigate`: replay a persistently non-finite step with hooks on every module. The first non-finite tensor is
  reported, forward before backward, with its rank and samples.
- `write_incident` / `read_incident`: the findings plus everything needed to reproduce them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pantheraml.base.errors import RunDirectoryError, StorageError
from pantheraml.base.folders import write_text
from pantheraml.engine.guard.policy import Anomaly, Suspect, find_suspect
from pantheraml.engine.step.feed import StepBatches
from pantheraml.models.fast import is_fused
from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.parallel.local_shards import NamedParameters
from pantheraml.parallel.process_group import World

VERSION = 2

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can hold non-finite values and support `isfinite`."""


@dataclass(frozen=True)
class Evidence:
    """Facts about a bad step, identical on all ranks."""

    tensor: str | None
    """Gradient that shows the anomaly, whichever rank holds it; None if there is none."""
    samples: list[list[int]]
    """Samples of the step, per rank."""


def gather_evidence(parts: NamedParameters, batches: StepBatches, anomaly: Anomaly | None, world: World) -> Evidence:
    """Combine what the ranks know. `parts`: this rank's shards, with gradients. A collective."""
    own = find_suspect(parts, anomaly), [int(sample) for samples in batches.own_samples for sample in samples]
    ranks = [own] if world.size == 1 else all_gather_json(own, world.long_timeout_group)
    suspects = [None if suspect is None else Suspect(*suspect) for suspect, _ in ranks]
    return Evidence(_worst(suspects, world.layout.stage_ranks), [samples for _, samples in ranks])


def _worst(suspects: Sequence[Suspect | None], stage_ranks: int) -> str | None:
    """Name of the largest; of several non-finite ones, the first in model order (pipeline stage, then parameter)."""
    ordered = [
        (-suspect.size, rank // stage_ranks, suspect.number, suspect.name)
        for rank, suspect in enumerate(suspects)
        if suspect
    ]
    return min(ordered)[-1] if ordered else None


@dataclass(frozen=True)
class Finding:
    """The first non-finite tensor on a rank."""

    rank: int
    phase: Literal["forward", "backward"]
    module: str | None
    """Name of the module in the model; None if it was found outside of all modules."""
    module_class: str | None
    tensor: str
    """`output`, a weight by name, `gradient of the output`, `loss`, or a parameter's gradient by name."""
    shape: list[int] | None
    """None, as are the next two, if it was found outside of all modules."""
    nan: int | None
    """Number of NaN values."""
    infinite: int | None
    micro_batch: int | None
    """Index of the micro-batch on that rank; None if unknown."""
    samples: list[int]
    """Indices in the prepared data of the samples it came from, as precisely as known."""
    tokens: list[int] | None = None
    """First non-finite token of each sample; None if unknown."""

    def __str__(self) -> str:
        """`first not finite: output of model.layers.3.mlp (LlamaMLP), forward, rank 0, sample 17`."""
        what = self.tensor if self.module is None or self.module in self.tensor else f"{self.tensor} of {self.module}"
        kind = "" if self.module_class is None else f" ({self.module_class})"
        samples = f"sample {', '.join(map(str, self.samples[:8]))}" if self.samples else "no sample"
        more = ", ..." if len(self.samples) > 8 else ""
        return f"first not finite: {what}{kind}, {self.phase}, rank {self.rank}, {samples}{more}"


class Replayable(Protocol):
    """A stepper that can replay the forward and backward passes of a step."""

    model: nn.Module
    world: World

    def replay(self, batches: StepBatches) -> tuple[Tensor, str | None]: ...


def investigate(stepper: Replayable, batches: StepBatches) -> list[Finding]:
    """Replay a step with hooks on every module and return the findings in rank order. A collective."""
    hooks = _NonfiniteHooks(stepper.world, batches)
    with hooks.attached(stepper.model):
        loss, gradient = stepper.replay(batches)
    found = hooks.found or hooks.outside_modules(loss, gradient)
    own = [] if found is None else [found]
    if stepper.world.size == 1:
        return own
    ranks = all_gather_json([asdict(finding) for finding in own], stepper.world.long_timeout_group)
    return [Finding(**finding) for findings in ranks for finding in findings]


def culprit(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that explains the others: ranks share gradients, so a forward finding comes first."""
    return min(findings, key=lambda finding: (finding.phase != "forward", finding.module is None), default=None)


class _NonfiniteHooks:
    """Checks the output of every module and its gradient until something is not finite."""

    def __init__(self, world: World, batches: StepBatches) -> None:
        self._world, self._batches = world, batches
        self._micro_batch: int | None = None
        self.found: Finding | None = None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        # Hooks inside a fused layer would make it run unfused: the replay must compute what the step did.
        fused = [layer for layer in model.modules() if is_fused(layer)]
        inside = {module for layer in fused for module in layer.modules()}.difference(fused)
        handles = [
            module.register_forward_hook(partial(self._after_forward, name))
            for name, module in model.named_modules()
            if module not in inside
        ]
        # Pipeline stages regroup the rows of a batch and DataParallel splits them: there, micro-batches are unknown.
        if self._world.layout.dims.pipeline == 1 and not self._world.replica_devices:
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            # Called once per micro-batch, while layers may run again in backward (activation checkpointing).
            handles.append(embedding.register_forward_pre_hook(self._next_micro_batch))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _next_micro_batch(self, module: nn.Module, args: Any) -> None:
        self._micro_batch = 0 if self._micro_batch is None else self._micro_batch + 1

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if self.found is not None:
                return
            if not _finite(tensor):
                weight = next((own for own, value in _weights(module) if not _finite(value)), None)
                what = "output" if weight is None else f"{name}.{weight}"
                self.found = self._finding("forward", name, module, what, tensor)
            elif tensor.requires_grad:
                tensor.register_hook(partial(self._in_backward, name, module, self._micro_batch))

    def _in_backward(self, name: str, module: nn.Module, micro_batch: int | None, gradient: Tensor) -> None:
        if self.found is None and not _finite(gradient):
            self._micro_batch = micro_batch
            self.found = self._finding("backward", name, module, "gradient of the output", gradient)

    def outside_modules(self, loss: Tensor, gradient: str | None) -> Finding | None:
        """Finding about the loss or a parameter gradient that no module hook saw."""
        phase: Literal["forward", "backward"] = "backward" if _finite(loss) else "forward"
        what = gradient if _finite(loss) else "loss"
        if what is None:
            return None
        return Finding(
            rank=self._world.rank,
            phase=phase,
            module=None,
            module_class=None,
            tensor=what,
            shape=None,
            nan=None,
            infinite=None,
            micro_batch=None,
            samples=self._samples(None, None)[0],
        )

    def _finding(
        self, phase: Literal["forward", "backward"], name: str, module: nn.Module, what: str, bad: Tensor
    ) -> Finding:
        values = local_part(bad)
        samples, tokens = self._samples(self._micro_batch, values)
        return Finding(
            rank=self._world.rank,
            phase=phase,
            module=name,
            module_class=type(module).__name__,
            tensor=what,
            shape=list(values.shape),
            nan=int(values.isnan().sum()),
            infinite=int(values.isinf().sum()),
            micro_batch=self._micro_batch,
            samples=samples,
            tokens=tokens,
        )

    def _samples(self, micro_batch: int | None, values: Tensor | None) -> tuple[list[int], list[int] | None]:
        """Samples whose rows of `values` are not finite, with the first bad token of each, if rows and tokens are
        identifiable; else all candidates."""
        own = self._batches.own_samples
        if micro_batch is None:
            return [int(sample) for samples in own for sample in samples], None
        if micro_batch >= len(own):
            return [], None  # a dummy batch without targets, so that this rank still joins collectives
        samples = [int(sample) for sample in own[micro_batch]]
        if values is None or values.ndim < 2 or len(values) != len(samples):
            return samples, None
        wrong = ~values.isfinite()
        bad = wrong.flatten(1).any(dim=1).tolist()
        samples = [sample for sample, is_bad in zip(samples, bad, strict=True) if is_bad]
        width = self._batches.micro_batches[micro_batch].input_ids.shape[1]
        if values.ndim != 3 or values.shape[1] != width or self._world.layout.dims.context > 1:
            return samples, None
        return samples, [int(row.any(dim=1).int().argmax()) for row, is_bad in zip(wrong, bad, strict=True) if is_bad]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard. Ranks stop checking at different points, so a check must not run collectives."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _finite(tensor: Tensor) -> bool:
    values = local_part(tensor)
    return values.dtype not in FLOAT_DTYPES or bool(values.isfinite().all())


def write_incident(path: Path, step: int, findings: Sequence[Finding], context: Mapping[str, Any]) -> None:
    """Write `findings` and `context`, everything else known about the step, as JSON."""
    content = {
        "version": VERSION,
        "step": step,
        **context,
        "findings": [asdict(finding) for finding in findings],
    }
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as err:
        raise StorageError(
            f"Cannot create the folder for incidents: {err.strerror}.",
            where=str(path.parent),
            fix="Free space on its disk, and check that the run folder is yours and writable.",
        ) from err
    write_text(path, json.dumps(_as_json(content), indent=1))


def read_incident(path: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Return the content of an incident file, and the findings in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise RunDirectoryError(
            f"Cannot read the incident {path}: {err}.",
            fix="Give RUN_DIR/incidents/step-N.json of a run that had one.",
        ) from err
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise RunDirectoryError(
            f"{path} is not an incident file that this version can read.", fix="Use the version that trained the run."
        )
    return content, [Finding(**finding) for finding in content["findings"]]


def _as_json(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become the strings 'nan', 'inf' and '-inf', as in events."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
