"""Find the operation that produces NaN in backward, and zero non-finite gradients as they are accumulated.

torch's anomaly mode records where each operation was called, but reports NaN by raising, which would leave the other
ranks of a run waiting. `find_nan_operation` therefore checks every autograd node with a hook, and no rank aborts.

`ZeroNonfiniteGrads` is for trainers that compute the gradient norm and clip by it before the guard is called: by then a
single NaN has spread to all gradients. Under DDP the values are zeroed before the all-reduce, so the gradients of the
other ranks still count.
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

from pantheraml.engine.guard.incident import Replayable, local_part, tensors_in
from pantheraml.engine.step.feed import StepBatches
from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.parallel.local_shards import NamedParameters

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
"""Leaf node of every autograd graph; it outlives the graph."""


def find_nan_operation(stepper: Replayable, batches: StepBatches) -> str | None:
    """Replay a step and return, per rank, the first operation that produced NaN in backward and where it was called.

    None if there is none. A collective.
    """
    hooks = _NodeHooks()
    handle = register_module_forward_hook(hooks.after_forward)
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            stepper.replay(batches)
    finally:
        handle.remove()
    if stepper.world.size == 1:
        return hooks.found
    ranks = all_gather_json(hooks.found, stepper.world.long_timeout_group)
    return "\n".join(f"rank {rank}: {found}" for rank, found in enumerate(ranks) if found is not None) or None


class _NodeHooks:
    """Hooks on the nodes of all graphs that modules build, including the loss, which is a module's output too."""

    def __init__(self) -> None:
        self._seen: set[Node] = set()
        self.found: str | None = None

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        pending = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in self._seen or node.name() == ACCUMULATE_GRAD:
                continue
            self._seen.add(node)
            metadata: Any = node.metadata  # annotated as a method in torch
            # Not the node itself: it would reference itself, and so keep its whole graph alive.
            node.register_hook(partial(self._after_backward, node.name(), metadata.get("traceback_", ())))
            pending += [other for other, _ in node.next_functions if other is not None]

    def _after_backward(
        self, name: str, traceback: Sequence[str], grad_in: Sequence[Tensor | None], grad_out: Sequence[Tensor | None]
    ) -> None:
        if self.found is None and any(value is not None and bool(local_part(value).isnan().any()) for value in grad_in):
            self.found = f"{name} gave NaN. It was called here:\n{''.join(traceback)}"


def trace_nan_backward(backward: Callable[[], object]) -> str | None:
    """Run `backward` over an existing graph and return the first operation that produces NaN; None if none does.

    Single-process only: it aborts the pass, so no peer may take part in it.
    """
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backward()
        except RuntimeError as err:
            if "returned nan values" not in str(err):
                raise
            traces = [str(warning.message) for warning in caught if "Traceback of forward call" in str(warning.message)]
            return "\n".join([str(err), *traces])
    return None


class ZeroNonfiniteGrads:
    """Zeroes non-finite gradient values from construction until `remove`.

    No host synchronization; costs two more passes over each gradient.
    """

    def __init__(self, parameters: NamedParameters) -> None:
        self._found = {p.device: torch.zeros((), dtype=torch.bool, device=p.device) for _, p in parameters}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._clean) for _, parameter in parameters]

    def take(self) -> Tensor:
        """Whether any value was zeroed on this rank since the last call."""
        device = next(iter(self._found))
        found = torch.stack([flag.to(device) for flag in self._found.values()]).any()
        for flag in self._found.values():
            flag.zero_()
        return found

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _clean(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._found[parameter.device].logical_or_(~parameter.grad.isfinite().all())
        torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
