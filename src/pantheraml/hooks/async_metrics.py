"""Asynchronous readback of logged metrics, during the optimizer step.

When transformers' trainers log a step, they read its loss and gradient norm after the optimizer step was queued. A
stream runs in order, so the host waits for the optimizer step as well, and then the GPU waits for the host to log and
start the next step. Both scalars are known before the optimizer step, so they are copied to the host there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.async_scalars import mirror_metrics_on_host
from pantheraml.models.causal_lm import fast_model


def _with_async_readback(get_grad_norm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_grad_norm)
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = get_grad_norm(self, *args, **kwargs)
        if fast_model(self.model) is not None:
            mirror_metrics_on_host(*(scalar for scalar in (norm, self._tr_loss) if isinstance(scalar, Tensor)))
        return norm

    return get


ASYNC_GRAD_NORM = LibraryPatch(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    class_name="Trainer",
    name="_get_grad_norm",
    make=_with_async_readback,
    fallback="logging a step waits for the optimizer step",
    required=False,
)
