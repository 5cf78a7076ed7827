"""Compare a fused layer with the layer it replaces, on a few random tokens.

Layers are fused by the names of their classes. If a release of transformers changes what such a class computes, its
fused form would train another model, and nothing would fail. So one layer of each kind runs both ways, forward and
backward, before any is fused. It is a copy in float32, without quantization and with the torch references of all ops:
then both agree up to the order of sums, whatever the weights are, and no kernel is compiled. Tens of milliseconds.

A few tokens do not show a sliding window, nor evaluation a dropout. So what both tell attention is compared, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pantheraml.kernels.dispatch import references_only
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.fp8_training import FP8TrainingLinear
from pantheraml.models.quantize.nf4 import NF4Linear

TOKENS = 16
FIRST_POSITION = 1_000_000
"""Beyond the context that some families scale queries from."""
TOLERANCE = 1e-2
"""Relative to what the layer adds to its input, and to the gradient. TF32 matmuls round to 1e-3."""
_ATTENTION = "pantheraml_compared"
_WITHOUT_EFFECT = {"use_cache", "output_attentions", "position_ids"}
"""Arguments that attention without a cache does not read."""


def why_not_equal(layer: Any, fuse_layer: Callable[[Any], None]) -> str | None:
    """Return how `layer` would differ once `fuse_layer` has fused it; None if it would not."""
    name = type(layer).__name__
    if any(tensor.is_meta for tensor in chain(layer.parameters(), layer.buffers())):
        return None  # its weights are not loaded yet
    try:
        with references_only(), torch.autocast(_device(layer).type, enabled=False):
            twin = _float32_copy(layer)
            theirs, their_calls = _run(twin)
            fuse_layer(twin)
            ours, our_calls = _run(twin)
    except Exception as err:  # noqa: BLE001 - another release's layer may raise anything; the reason is reported
        return f"comparing it with {name} failed: {type(err).__name__}: {next(iter(str(err).splitlines()), '')}"
    for part, actual, expected in zip(("output", "gradient"), ours, theirs, strict=True):
        distance = float((actual - expected).norm() / expected.norm())
        if not distance <= TOLERANCE and bool(expected.isfinite().all()):  # a NaN weight is reported in training
            return f"its {part} differs by {distance:.0%} from that of {name} in this version of transformers"
    if our_calls != their_calls:
        return (
            f"{name} calls attention with {_first_difference(their_calls, our_calls)} in this version of transformers"
        )
    return None


def _first_difference(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    if len(theirs) != 1 or len(ours) != 1:
        return f"{len(theirs)} calls and not {len(ours)}"
    (their, our) = theirs[0], ours[0]
    name = min(name for name in {*their, *our} if their.get(name) != our.get(name))
    return f"{name}={their.get(name)} and not {our.get(name)}"


def _device(layer: Any) -> torch.device:
    device: torch.device = next(layer.parameters()).device
    return device


def _float32_copy(layer: nn.Module) -> Any:
    twin = copy.deepcopy(layer)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FP8Linear | NF4Linear):
                dense: Any = child.to_linear(torch.float32)
                setattr(parent, name, dense.requires_grad_(False))
            elif isinstance(child, FP8TrainingLinear):
                cast(Any, child).__class__ = nn.Linear
    for adapted in twin.modules():  # B is zero before training: without this, adapters would not be compared
        if isinstance(adapted, LoraLayer):
            for up in adapted.lora_B.values():
                nn.init.normal_(up.weight, std=0.02, generator=_generator(up.weight.device))
    return twin.float().eval()


def _generator(device: torch.device | str) -> torch.Generator:
    """Return a generator of its own, so that the global one is not changed."""
    return torch.Generator(device).manual_seed(0)


def _run(layer: Any) -> tuple[tuple[Tensor, Tensor], list[dict[str, Any]]]:
    """Return what the layer adds to its input, and the gradient of the input, less that of the output; and the
    arguments of every call of attention."""
    attention, device = layer.self_attn, _device(layer)
    draw, width, size = _generator("cpu"), attention.config.hidden_size, attention.head_dim
    x, g = (torch.randn(1, TOKENS, width, generator=draw).to(device) for _ in range(2))
    angles = torch.arange(TOKENS)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    rope = tuple(torch.cat([table] * 2, 1)[None].to(device) for table in (angles.cos(), angles.sin()))
    x.requires_grad_()
    positions = FIRST_POSITION + torch.arange(TOKENS, device=device)[None]
    calls: list[dict[str, Any]] = []
    ALL_ATTENTION_FUNCTIONS[_ATTENTION] = _recorded(calls)
    attention.config._attn_implementation = _ATTENTION  # of the copy
    attention.training = True  # its own dropout, not that of its layers
    try:
        with torch.enable_grad():
            out = layer.forward(x, position_embeddings=rope, position_ids=positions, attention_mask=None)
            (gradient,) = torch.autograd.grad(out, x, g)
    finally:
        del ALL_ATTENTION_FUNCTIONS[_ATTENTION]
    return ((out - x).detach(), gradient - g), calls


def _recorded(calls: list[dict[str, Any]]) -> Callable[..., tuple[Tensor, None]]:
    """Return torch's attention without dropout, which appends its arguments to `calls`."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, None]:
        told = {name: value for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
        calls.append({name: _comparable(value) for name, value in told.items() if value is not None})
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **{**arguments, "dropout": 0.0})
        return out, None

    return attend


def _comparable(value: Any) -> Any:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else value
