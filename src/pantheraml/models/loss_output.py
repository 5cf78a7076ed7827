"""What a training forward with `labels` returns: the loss, and logits that are computed if somebody reads them.

A trainer that reads `loss` alone never has full logits in memory. A script whose own loss is made of `outputs.logits`,
although it passed labels, gets what the plain model would have given, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

_NAME = "_compute_logits"


@dataclass
class LossOutput(CausalLMOutputWithPast):
    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            _compute(self)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if key in ("loss", 0):  # which comes first
            return super().__getitem__("loss")
        _compute(self)
        return super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        _compute(self)
        values: tuple[Any, ...] = super().to_tuple()
        return values

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key == "logits" else super().get(key, default)


def with_logits_on_demand(output: LossOutput, head: Callable[[Tensor], Tensor], hidden: Tensor) -> LossOutput:
    """Make `logits` what `head` computes from `hidden`, in the modes of this moment."""
    kind, grad = hidden.device.type, torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def compute() -> Tensor:
        with torch.set_grad_enabled(grad), torch.autocast(kind, dtype=dtype, enabled=autocast):
            logits = head(hidden)
        return logits.float() if autocast else logits

    loss = output.loss
    output.__dict__[_NAME] = compute
    if loss is not None and loss.requires_grad:
        # accelerate makes another output of the same loss under mixed precision; the hidden states go with the backward
        kept = vars(loss)[_NAME] = [compute]
        # Not a hook that refers to the loss, whose graph has the hook: without a backward, neither would be freed.
        loss.register_hook(lambda _: kept.clear())
    return output


def _compute(output: LossOutput) -> None:
    own, loss = output.__dict__, output.__dict__.get("loss")
    compute = own.pop(_NAME, None) or next(iter(vars(loss).get(_NAME, ()) if loss is not None else ()), None)
    if compute is None or own.get("logits") is not None:
        return
    output.logits = compute()
    for key in ("past_key_values", "hidden_states", "attentions"):  # in the order of the fields, for `outputs[1]`
        if key in output:
            output.move_to_end(key)
