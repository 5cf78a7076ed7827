"""Write the table of docs/families.md: for each causal family in the installed transformers, whether its decoder layers
are fused, and its packing support.

A family counts as fused if logits and gradients of a small model with adapters, fused, are those of the same unfused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import PantheraError
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.fast import fuse, is_fused
from pantheraml.models.fast.families import UNFUSED
from pantheraml.models.packing_check import PackingSupport, check_packing_support
from pantheraml.models.tiny_model import CannotShrinkError, tiny_model
from pantheraml.specs.train import DataConfig, MethodConfig

PAGE = Path(__file__).with_name("families.md")
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
MOST_DISTANCE = 1e-4
"""Relative, of logits and gradients in float32: only the order of sums differs."""
SEQ_LEN: int = DataConfig.model_fields["seq_len"].default

_HYBRID = ["conv", "conv", "full_attention", "conv"]
LIKE_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2": {"num_hidden_layers": 4, "layer_types": _HYBRID},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": _HYBRID},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    "reformer": {"is_decoder": True},
}
"""Values that published checkpoints set in config.json and the family's defaults lack."""

HOW = {
    "boundaries": "packed",
    "positions": "packed, with a mask",
    "masks": "packed, with a mask of ours",
}


def families() -> Iterator[tuple[str, Any]]:
    """Yield every family's name with its default config, or the exception that building it raised."""
    for name in sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING}):
        changes = dict(LIKE_PUBLISHED.get(name, {}))
        try:
            config = AutoConfig.for_model(name, **changes)
            if getattr(config, "is_decoder", None) is False:  # encoders: check their decoder variant
                config = AutoConfig.for_model(name, **changes, is_decoder=True)
            yield name, config
        except Exception as err:  # noqa: BLE001 - defaults that the family itself rejects
            yield name, err


def verdict_of(config: Any) -> PackingSupport:
    if isinstance(config, Exception):
        line = (str(config).strip().splitlines() or [""])[-1].strip()
        return PackingSupport((), f"its default config cannot be used ({line})")
    return check_packing_support(config, longest=SEQ_LEN)


def layers_of(config: Any) -> str:
    """Return whether the family's decoder layers are fused with LoRA, by fusing those of a small model."""
    if isinstance(config, Exception):
        return "not checked"
    try:
        base: Any = tiny_model(config)
        reason = next((UNFUSED[name] for name in map(_class_name, _layers(base)) if name in UNFUSED), None)
        with warnings.catch_warnings():  # of PEFT, for experts without adapters
            warnings.simplefilter("ignore")
            model: Any = apply_method(base, MethodConfig(rank=4), seed=0)
    except CannotShrinkError:
        return "not checked"
    except PantheraError:  # PEFT cannot adapt all of its layers
        return "unfused" if reason is None else f"unfused: {reason}"
    for _, parameter in trainable_parameters(model):
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    twin = copy.deepcopy(model)
    fuse(twin)
    layers = _layers(twin.get_base_model())
    fused = sum(map(is_fused, layers))
    if fused == 0:
        return "unfused" if reason is None else f"unfused: {reason}"
    distance = max(map(_distance, _results(twin), _results(model)))
    if not distance < MOST_DISTANCE:
        raise AssertionError(f"fused layers of {type(config).__name__} differ from plain ones by {distance}")
    return "fused" if fused == len(layers) else f"fused: {fused} of {len(layers)}"


def _layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers; all layers of a model that does not tell its decoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [layer for layer in (decoder or model).modules() if isinstance(layer, GradientCheckpointingLayer)]


def _class_name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _results(model: nn.Module) -> list[Tensor]:
    """Return logits, and the gradients of all adapters, in float32."""
    ids = torch.arange(24).view(2, 12)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = [parameter.grad for _, parameter in trainable_parameters(model)]
    return [out.logits.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def row(name: str, verdict: PackingSupport, layers: str) -> str:
    if verdict.refused is not None:
        result, reason = "refused", verdict.refused
    elif verdict.modes:
        result, reason = HOW[verdict.modes[0]], ""
    else:
        result, reason = "not packed", verdict.reason or ""
    reason = reason.replace("|", "\\|").replace("<", "&lt;")
    layers = "refused" if verdict.refused is not None else layers
    return f"| `{name}` | {layers} | {result} | {reason if len(reason) <= 160 else reason[:157] + '...'} |"


def render() -> str:
    """Render the text between the markers."""
    lines = [
        f"transformers {transformers.__version__}, `data.seq_len={SEQ_LEN}`:",
        "",
        "| family (`model_type`) | decoder layers | documents are | reason |",
        "|---|---|---|---|",
        *(row(name, verdict_of(config), layers_of(config)) for name, config in families()),
    ]
    return "\n".join(lines)


def parts(page: str) -> tuple[str, str, str]:
    """Split a page into the text before, between and after the markers."""
    before, _, rest = page.partition(BEGIN + "\n")
    table, _, after = rest.partition("\n" + END)
    return before, table, after


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{render()}\n{END}{after}", encoding="utf-8")
