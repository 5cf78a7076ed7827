"""What goes wrong in a step that is not finite, time and again: its passes are run with every module watched.

The first tensor that is not finite is named, forward before backward, with the rank and the samples it came from.
Findings and what it takes to reproduce them go to `incidents/step-N.json`.
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
from pantheraml.engine.feed import StepBatches
from pantheraml.parallel.exchange import all_gather_json
from pantheraml.parallel.process_group import World

VERSION = 2

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What can hold values that are not finite, and be asked for them."""


@dataclass(frozen=True)
class Finding:
    """The first thing that was not finite on a rank."""

    rank: int
    phase: Literal["forward", "backward"]
    module: str | None
    """Its name in the model; None if it was found outside of all modules."""
    module_class: str | None
    tensor: str
    """`output`, a weight by name, `gradient of the output`, `loss`, or a parameter's gradient by name."""
    shape: list[int] | None
    """None, and so the next two, if it was found outside of all modules."""
    nan: int | None
    """Values of it that are NaN."""
    infinite: int | None
    micro_batch: int | None
    """Its number on that rank; None where that cannot be told."""
    samples: list[int]
    """Numbers, in the prepared data, of the samples it came from, as closely as can be told."""
    tokens: list[int] | None = None
    """The first token of each of those where it is not finite; None where that cannot be told."""

    def __str__(self) -> str:
        """`first not finite: output of model.layers.3.mlp (LlamaMLP), forward, rank 0, sample 17`."""
        what = self.tensor if self.module is None or self.module in self.tensor else f"{self.tensor} of {self.module}"
        kind = "" if self.module_class is None else f" ({self.module_class})"
        samples = f"sample {', '.join(map(str, self.samples[:8]))}" if self.samples else "no sample"
        more = ", ..." if len(self.samples) > 8 else ""
        return f"first not finite: {what}{kind}, {self.phase}, rank {self.rank}, {samples}{more}"


class Watched(Protocol):
    """A step that can be run again."""

    model: nn.Module
    world: World

    def replay(self, batches: StepBatches) -> tuple[Tensor, str | None]: ...


def investigate(stepper: Watched, batches: StepBatches) -> list[Finding]:
    """Run the passes of a step again, watched; what each rank found, in rank order. A collective."""
    watch = _Watch(stepper.world, batches)
    with watch.over(stepper.model):
        loss, gradient = stepper.replay(batches)
    found = watch.found or watch.outside(loss, gradient)
    own = [] if found is None else [found]
    if stepper.world.size == 1:
        return own
    everyone = all_gather_json([asdict(finding) for finding in own], stepper.world.patient_group)
    return [Finding(**finding) for findings in everyone for finding in findings]


def culprit(findings: Sequence[Finding]) -> Finding | None:
    """The finding that explains the others: ranks share gradients, so that of a forward pass comes before those."""
    return min(findings, key=lambda finding: (finding.phase != "forward", finding.module is None), default=None)


def write_incident(path: Path, step: int, findings: Sequence[Finding], context: Mapping[str, Any]) -> None:
    """`context`: what else there is to say about the step."""
    content = {
        "version": VERSION,
        "step": step,
        **context,
        "findings": [asdict(finding) for finding in findings],
    }
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as err:
        raise StorageError(f"The folder for incidents cannot be made: {err.strerror}.", where=str(path.parent)) from err
    write_text(path, json.dumps(_as_json(content), indent=1))


def read_incident(path: Path) -> tuple[dict[str, Any], list[Finding]]:
    """What was written, and the findings in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise RunDirectoryError(f"The incident {path} cannot be read: {err}.") from err
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise RunDirectoryError(
            f"{path} is no incident that this version can read.", todo="Use the version that trained the run."
        )
    return content, [Finding(**finding) for finding in content["findings"]]


class _Watch:
    """Looks at what every module gives, and at the gradient of it, until something is not finite."""

    def __init__(self, world: World, batches: StepBatches) -> None:
        self._world, self._batches = world, batches
        self._micro_batch: int | None = None
        self.found: Finding | None = None

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(partial(self._after_forward, name)) for name, module in model.named_modules()
        ]
        # A pipeline lays the rows of its batches together anew, and copies of a model share them.
        if self._world.layout.dims.pipeline == 1 and not self._world.copies_on:
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            # It is called once for each micro-batch, while layers may be called again in backward.
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

    def outside(self, loss: Tensor, gradient: str | None) -> Finding | None:
        """Of what no module saw."""
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
        """Those in whose rows `values` are not finite, and from which token on, where rows and tokens can be told; else
        all that may have been it."""
        own = self._batches.own_samples
        if micro_batch is None:
            return [int(sample) for samples in own for sample in samples], None
        if micro_batch >= len(own):
            return [], None  # a batch without targets, to keep peers company
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
    """The tensors in what a module gives."""
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
    """This rank's part: ranks stop looking at different places, so none may ask another."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _finite(tensor: Tensor) -> bool:
    values = local_part(tensor)
    return values.dtype not in WIDE or bool(values.isfinite().all())


def _as_json(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite is written as the string 'nan', 'inf' or '-inf', as in events."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
