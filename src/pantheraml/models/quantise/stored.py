"""Checkpoints whose weights are packed already: what they are packed in, and how their tensors are read.

Read are bitsandbytes' folders in nf4 (with or without a second quantisation of the magnitudes) and in int8, both
without loss, and fp8 folders (e4m3 with a scale per tensor, per row or per block). FP8Linear scales by row, so an fp8
weight is dequantised to float32 and rounded again: the same e4m3 values come back where a row's largest one is e4m3's
largest (row-wise scales, as a rule), and within e4m3's rounding elsewhere. No other package is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.kernels.nf4 import BLOCK, SCALE_BLOCK, BlockScales, NF4Weight, nf4_levels
from pantheraml.models.quantise.int8 import LARGEST, Int8Weight

_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_PARTS = {
    "nf4": (
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        _NF4_STATE,
    ),
    "int8": ("SCB", "weight_format"),
    # scales of activations come with some folders; nothing here quantises activations by them
    "fp8": ("weight_scale", "weight_scale_inv", "input_scale", "input_scale_ub", "activation_scale"),
}
_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
_TODO = "Use the model's plain (bf16) weights, and let model.precision or method.kind=qlora pack them."


@dataclass(frozen=True)
class StoredFormat:
    """What a checkpoint's linear layers are packed in."""

    packing: Literal["fp8", "int8", "nf4"]
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, where the folder says so (fp8)."""

    def split(self, key: str) -> tuple[str, str] | None:
        """`layer.weight.absmax` -> (`layer`, `weight.absmax`) for the tensors that come with a packed weight."""
        for part in _PARTS[self.packing]:
            if key.endswith(f".{part}"):
                return key.removesuffix(f".{part}"), part
        return None


def stored_format(config: Any) -> StoredFormat | None:
    """From the model's config.json; None for plain weights, UnsupportedModelError for what cannot be read."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else "unknown"))
    if method == "bitsandbytes":
        if settings.get("load_in_8bit"):
            return StoredFormat("int8")
        kind = settings.get("bnb_4bit_quant_type", "fp4")
        if kind != "nf4":
            raise UnsupportedModelError(
                f"The model's weights are stored in bitsandbytes' {kind}; nf4 is read.", todo=_TODO
            )
        return StoredFormat("nf4")
    if method not in _FP8_METHODS:
        raise UnsupportedModelError(
            f"The model's weights are stored quantised by {method}, which is not read.", todo=_TODO
        )
    block = settings.get("weight_block_size")
    return StoredFormat("fp8", None if block is None else (int(block[0]), int(block[1])))


def read_stored(
    stored: StoredFormat, parts: Mapping[str, Tensor], shape: torch.Size, *, where: str
) -> NF4Weight | Int8Weight | Tensor:
    """The weight (out_features, in_features) that the tensors of the layer `where` stand for; dense for fp8."""
    match stored.packing:
        case "nf4":
            return _read_nf4(parts, shape, where)
        case "int8":
            return _read_int8(parts, shape, where)
        case "fp8":
            return _read_fp8(parts, shape, stored.block, where)


def nf4_parts(weight: NF4Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """What `read_stored` reads the weight from, by the names of the tensors within their layer; its magnitudes are
    those of `storable_scales`. `dtype`: what the weight was, and becomes for others who read it."""
    code, table, step, low = weight.scales
    if table is None or step is None or low is None:
        raise ValueError("the weight's magnitudes are in another form")
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight.shape),
        "nested_blocksize": SCALE_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(low[0]),
    }
    return {
        "weight": weight.payload[: -(-weight.shape.numel() // 2)].view(-1, 1),
        "weight.absmax": code,
        "weight.quant_map": nf4_levels(),
        "weight.nested_absmax": step,
        "weight.nested_quant_map": table,
        _NF4_STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _read_nf4(parts: Mapping[str, Tensor], shape: torch.Size, where: str) -> NF4Weight:
    absmax, levels = _part(parts, "weight.absmax", where), _part(parts, "weight.quant_map", where)
    try:
        state = json.loads(bytes(_part(parts, _NF4_STATE, where).tolist()))
        block, stored_shape = state["blocksize"], torch.Size(state["shape"])
        nested_block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    except (ValueError, KeyError, TypeError) as err:
        raise ModelError("The description of a packed weight is damaged.", where=where) from err
    if block != BLOCK or nested_block not in (None, SCALE_BLOCK) or not torch.equal(levels.cpu(), nf4_levels()):
        raise UnsupportedModelError(
            f"An nf4 weight in blocks of {block} (magnitudes in blocks of {nested_block}) is not read;"
            f" blocks of {BLOCK} (and {SCALE_BLOCK}) with the usual levels are.",
            where=where,
            todo=_TODO,
        )
    # folders made for sharding keep the bytes in another dtype
    payload = parts["weight"].contiguous().view(torch.uint8).flatten()
    blocks = -(-shape.numel() // BLOCK)
    if stored_shape != shape or payload.numel() != -(-shape.numel() // 2) or absmax.numel() != blocks:
        raise ModelError(f"A packed weight of shape {tuple(stored_shape)} does not fit {tuple(shape)}.", where=where)
    if nested_block is None:
        return NF4Weight(payload, BlockScales(absmax.float()), shape)
    step = _part(parts, "weight.nested_absmax", where).float()
    table = _part(parts, "weight.nested_quant_map", where).float()
    if (
        offset is None
        or step.numel() != -(-blocks // SCALE_BLOCK)
        or table.numel() != 256
        or absmax.dtype != torch.uint8
    ):
        raise ModelError("The magnitudes of a packed weight are damaged.", where=where)
    return NF4Weight(payload, BlockScales(absmax, table, step, torch.full_like(step, offset)), shape)


def _read_int8(parts: Mapping[str, Tensor], shape: torch.Size, where: str) -> Int8Weight:
    weight, largest = parts["weight"], _part(parts, "SCB", where)
    if weight.dtype != torch.int8 or weight.shape != shape or largest.numel() != shape[0]:
        raise ModelError(f"A packed int8 weight does not fit {tuple(shape)}.", where=where)
    layout = parts.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise UnsupportedModelError(
            "An int8 weight that was laid out for one kind of GPU is not read.", where=where, todo=_TODO
        )
    return Int8Weight(weight, largest.float().view(-1, 1) / LARGEST)


def _read_fp8(parts: Mapping[str, Tensor], shape: torch.Size, block: tuple[int, int] | None, where: str) -> Tensor:
    weight = parts["weight"]
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else _part(parts, "weight_scale", where)
    if weight.dtype != torch.float8_e4m3fn:
        raise UnsupportedModelError(
            f"A packed weight in {weight.dtype} is not read; float8_e4m3fn is.", where=where, todo=_TODO
        )
    if weight.shape != shape:
        raise ModelError(f"A packed weight of shape {tuple(weight.shape)} does not fit {tuple(shape)}.", where=where)
    dense, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return dense.mul_(scale.flatten())
    if scale.numel() == shape[0] and scale.shape in ((shape[0],), (shape[0], 1)):
        return dense.mul_(scale.view(-1, 1))
    if block is None or scale.shape != (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
        raise UnsupportedModelError(
            f"The scales {tuple(scale.shape)} of a packed weight {tuple(shape)} are neither by row nor by block.",
            where=where,
            todo=_TODO,
        )
    for number, row in enumerate(scale):
        dense[number * block[0] : (number + 1) * block[0]].mul_(row.repeat_interleave(block[1])[: shape[1]])
    return dense


def _part(parts: Mapping[str, Tensor], name: str, where: str) -> Tensor:
    if name not in parts:
        raise ModelError(f"A packed weight comes without its {name}.", where=where, todo="Get the model again.")
    return parts[name]
