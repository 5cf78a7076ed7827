"""Which operation gives NaN in a backward pass, and the line of code that called it.

torch's anomaly mode remembers where each operation was called; but it tells of NaN by an error, for which the other
ranks of a run would not wait. So every operation is looked at here as it runs, and no rank breaks off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook

from pantheraml.engine.feed import StepBatches
from pantheraml.engine.guard.incident import Watched, local_part, tensors_in
from pantheraml.parallel.exchange import all_gather_json

ACCUMULATES = "torch::autograd::AccumulateGrad"
"""What ends every graph, and outlives it."""


def failed_operation(stepper: Watched, batches: StepBatches) -> str | None:
    """Run the passes of a step again; on each rank the first operation that gave NaN there, and where it was called.
    None if there is none. A collective."""
    operations = _Operations()
    handle = register_module_forward_hook(operations.after_forward)
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            stepper.replay(batches)
    finally:
        handle.remove()
    if stepper.world.size == 1:
        return operations.found
    everyone = all_gather_json(operations.found, stepper.world.patient_group)
    return "\n".join(f"rank {rank}: {found}" for rank, found in enumerate(everyone) if found is not None) or None


class _Operations:
    """Those of all graphs that modules make, the loss's included, which is a module's too."""

    def __init__(self) -> None:
        self._known: set[Node] = set()
        self.found: str | None = None

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        waiting = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._known or node.name() == ACCUMULATES:
                continue
            self._known.add(node)
            about: Any = node.metadata  # which torch annotates as a method
            # not the node itself, which would then hold on to itself and so to all of its graph
            node.register_hook(partial(self._after_backward, node.name(), about.get("traceback_", ())))
            waiting += [other for other, _ in node.next_functions if other is not None]

    def _after_backward(
        self, name: str, called: Sequence[str], given: Sequence[Tensor | None], taken: Sequence[Tensor | None]
    ) -> None:
        if self.found is None and any(value is not None and bool(local_part(value).isnan().any()) for value in given):
            self.found = f"{name} gave NaN. It was called here:\n{''.join(called)}"


def operation_with_nan(backward: Callable[[], object]) -> str | None:
    """The first operation that gives NaN while `backward` runs, through a graph that is there already and to which no
    peer is a party; None if none does."""
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            backward()
        except RuntimeError as err:
            if "returned nan values" not in str(err):
                raise
            traces = [str(warning.message) for warning in told if "Traceback of forward call" in str(warning.message)]
            return "\n".join([str(err), *traces])
    return None
