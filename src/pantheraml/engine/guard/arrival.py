"""Gradient values that are not finite, made 0 as soon as a backward pass has added them to a gradient.

For trainers that take the gradients' norm, and multiply by what comes of it, before anybody is asked: one NaN is all of
them by then. Under DDP this is before processes exchange gradients, so what the others have found still enters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.parallel.local import NamedParameters


class ZeroOnArrival:
    """From here to `remove`. Hosts do not wait for it; each gradient is gone through twice more."""

    def __init__(self, parameters: NamedParameters) -> None:
        self._found = {p.device: torch.zeros((), dtype=torch.bool, device=p.device) for _, p in parameters}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._clean) for _, parameter in parameters]

    def take(self) -> Tensor:
        """Whether there were such values here since it was last asked."""
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
