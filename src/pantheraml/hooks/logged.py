"""What is logged of a step, read while the optimizer's step is under way.

When transformers' trainers log a step, they read its loss and the norm of its gradients, and by then the optimizer's
step is queued. A GPU answers in order, so the host waits for that, too, and then the GPU waits for the host, which logs
and begins the next step. Both numbers are known before the optimizer's step begins: there they are sent to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pantheraml.hooks.replacement import Replacement
from pantheraml.models.causal_lm import fast_model
from pantheraml.models.read_ahead import metrics_ahead


def _sent(get_grad_norm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_grad_norm)
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = get_grad_norm(self, *args, **kwargs)
        if fast_model(self.model) is not None:
            metrics_ahead(*(number for number in (norm, self._tr_loss) if isinstance(number, Tensor)))
        return norm

    return get


GRADIENT_NORM = Replacement(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    of_class="Trainer",
    name="_get_grad_norm",
    make=_sent,
    otherwise="a step that is logged waits for the optimizer's",
    needed=False,
)
