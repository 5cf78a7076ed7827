"""`optim="adamw_8bit"` and its variants in transformers' `Trainer`, without bitsandbytes.

Most scripts of the field ask for an 8-bit AdamW, which transformers takes from bitsandbytes alone. Where that is not
installed, a trainer of our models gets the optimizer of `train.optimizer: adamw8bit`. Where it is, nothing changes.

As transformers does with bitsandbytes, embeddings have float32 moments: rare tokens have gradients far from those of
frequent ones. Paging, which moves states to host memory when the GPU is full, is not provided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from transformers.utils import is_bitsandbytes_available

from pantheraml.base import log
from pantheraml.engine.optim.adamw import LeanAdamW, MomentFormat
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.causal_lm import fast_model

logger = log.get(__name__)

Handler = Callable[[Any], tuple[Any, dict[str, Any]]]

_MOMENTS: Mapping[str, MomentFormat] = {
    "adamw_8bit": "8bit", "adamw_bnb_8bit": "8bit", "paged_adamw_8bit": "8bit", "paged_adamw_32bit": "fp32",
}  # fmt: skip


def _with_own_adamw(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    return {name: _unless_installed(handler) if name in _MOMENTS else handler for name, handler in handlers.items()}


def _unless_installed(handler: Handler) -> Handler:
    @functools.wraps(handler)
    def choose(context: Any) -> tuple[Any, dict[str, Any]]:
        # a subclass of Trainer may not pass the model
        if is_bitsandbytes_available() or (context.model is not None and fast_model(context.model) is None):
            return handler(context)
        return _own_adamw(context)

    return choose


def _own_adamw(context: Any) -> tuple[Any, dict[str, Any]]:
    name = str(getattr(context.args.optim, "value", context.args.optim))
    moments = _MOMENTS[name]
    paging = ", which does not page states to host memory" if name.startswith("paged") else ""
    logger.info(
        "optim=%s uses our own AdamW with %s moments%s: bitsandbytes is not installed",
        name, "8-bit" if moments == "8bit" else "float32", paging,
    )  # fmt: skip
    settings = {**context.optimizer_kwargs, **context.adam_kwargs}
    model = context.model or nn.Module()
    if moments == "fp32" and all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad):
        return AdamW, {**settings, "fused": True}
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return LeanAdamW, {**settings, "moments": moments, "seed": context.args.seed, "not_8bit": embeddings}


OWN_ADAMW = LibraryPatch(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    name="_OPTIMIZER_HANDLERS",
    make=_with_own_adamw,
    fallback='optim="adamw_8bit" needs bitsandbytes',
    required=False,
)
