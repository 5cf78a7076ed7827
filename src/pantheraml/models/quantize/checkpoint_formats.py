"""Read the weights of checkpoints that are already quantized.

Supported: bitsandbytes nf4 (with or without double quantization) and int8, both lossless, fp8 (e4m3 with a scale per
tensor, per row or per block), and mxfp4 experts, which are dequantized (see `mxfp4.py`). FP8Linear scales per row, so
an fp8 weight is dequantized to float32 and requantized: the e4m3 values are identical where a row's largest value is
e4m3's maximum (usual for row-wise scales), and within e4m3 rounding elsewhere. No other package is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.kernels.nf4.format import BLOCK, SCALE_BLOCK, BlockScales, NF4Weight, nf4_levels
from pantheraml.models.quantize.int8 import INT8_MAX, Int8Weight

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
    # some checkpoints ship static activation scales, which are ignored
    "fp8": ("weight_scale", "weight_scale_inv", "input_scale", "input_scale_ub", "activation_scale"),
}
MXFP4_PARTS = ("blocks", "scales")
_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
_FIX = "Use the model's plain (bf16) weights, and quantize them with model.precision or method.kind=qlora."
_AGAIN = "The checkpoint is damaged: download it again, or use the model's plain (bf16) weights."


@dataclass(frozen=True)
class CheckpointFormat:
    """Quantization format of a checkpoint's linear layers, or (mxfp4) of its stacked experts."""

    quant_format: Literal["fp8", "int8", "mxfp4", "nf4"]
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if the config specifies it (fp8)."""

    @property
    def linear_format(self) -> Literal["fp8", "int8", "nf4"] | None:
        """Format of its linear layers; None: they are not quantized."""
        return None if self.quant_format == "mxfp4" else self.quant_format

    def split(self, key: str) -> tuple[str, str] | None:
        """Split the name of a quantization tensor: `layer.weight.absmax` -> (`layer.weight`, `weight.absmax`)."""
        if self.quant_format == "mxfp4":
            name, _, part = key.rpartition("_")
            return (name, part) if part in MXFP4_PARTS else None
        for part in _PARTS[self.quant_format]:
            if key.endswith(f".{part}"):
                return f"{key.removesuffix(f'.{part}')}.weight", part
        return None


def detect_checkpoint_format(config: Any) -> CheckpointFormat | None:
    """Return the format named in the model's config.json, or None for unquantized weights.

    Raises UnsupportedModelError for a format that cannot be read.
    """
    quant_config = getattr(config, "quantization_config", None)
    if quant_config is None:
        return None
    settings: Mapping[str, Any] = quant_config if isinstance(quant_config, Mapping) else quant_config.to_dict()
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else "unknown"))
    if method == "bitsandbytes":
        if settings.get("load_in_8bit"):
            return CheckpointFormat("int8")
        kind = settings.get("bnb_4bit_quant_type", "fp4")
        if kind != "nf4":
            raise UnsupportedModelError(
                f"The checkpoint is quantized with bitsandbytes {kind}; only nf4 is supported.", fix=_FIX
            )
        return CheckpointFormat("nf4")
    if method == "mxfp4":
        return CheckpointFormat("mxfp4")
    if method not in _FP8_METHODS:
        raise UnsupportedModelError(f"The checkpoint is quantized with {method}, which is not supported.", fix=_FIX)
    block = settings.get("weight_block_size")
    return CheckpointFormat("fp8", None if block is None else (int(block[0]), int(block[1])))


def read_quantized_weight(
    checkpoint_format: CheckpointFormat, parts: Mapping[str, Tensor], shape: torch.Size, *, where: str
) -> NF4Weight | Int8Weight | Tensor:
    """Return the weight (out_features, in_features) of the layer `where` from its checkpoint tensors; dense for fp8."""
    match checkpoint_format.quant_format:
        case "nf4":
            return _read_nf4(parts, shape, where)
        case "int8":
            return _read_int8(parts, shape, where)
        case "fp8":
            return _read_fp8(parts, shape, checkpoint_format.block, where)
        case "mxfp4":
            raise UnsupportedModelError(
                "A linear layer in mxfp4 is not supported; only experts are.", where=where, fix=_FIX
            )


def nf4_checkpoint_tensors(weight: NF4Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that `read_quantized_weight` reads, by their names within the layer.

    The block scales must come from `storable_scales`. `dtype` is the weight's original dtype, and what other readers
    dequantize to.
    """
    code, table, step, low = weight.scales
    if table is None or step is None or low is None:
        raise ValueError("the block scales are not double-quantized")
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
        "weight": weight.qdata[: -(-weight.shape.numel() // 2)].view(-1, 1),
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
        raise ModelError("The quantization state of a weight is corrupted.", where=where, fix=_AGAIN) from err
    if block != BLOCK or nested_block not in (None, SCALE_BLOCK) or not torch.equal(levels.cpu(), nf4_levels()):
        raise UnsupportedModelError(
            f"An nf4 weight with blocks of {block} (scales in blocks of {nested_block}) is not supported;"
            f" only blocks of {BLOCK} (and {SCALE_BLOCK}) with the standard levels are.",
            where=where,
            fix=_FIX,
        )
    # checkpoints made for FSDP store the bytes in another dtype (bnb_4bit_quant_storage)
    qdata = parts["weight"].contiguous().view(torch.uint8).flatten()
    blocks = -(-shape.numel() // BLOCK)
    if stored_shape != shape or qdata.numel() != -(-shape.numel() // 2) or absmax.numel() != blocks:
        raise ModelError(
            f"A quantized weight of shape {tuple(stored_shape)} does not fit {tuple(shape)}.", where=where, fix=_AGAIN
        )
    if nested_block is None:
        return NF4Weight(qdata, BlockScales(absmax.float()), shape)
    step = _part(parts, "weight.nested_absmax", where).float()
    table = _part(parts, "weight.nested_quant_map", where).float()
    if (
        offset is None
        or step.numel() != -(-blocks // SCALE_BLOCK)
        or table.numel() != 256
        or absmax.dtype != torch.uint8
    ):
        raise ModelError("The scales of a quantized weight are corrupted.", where=where, fix=_AGAIN)
    return NF4Weight(qdata, BlockScales(absmax, table, step, torch.full_like(step, offset)), shape)


def _read_int8(parts: Mapping[str, Tensor], shape: torch.Size, where: str) -> Int8Weight:
    weight, largest = parts["weight"], _part(parts, "SCB", where)
    if weight.dtype != torch.int8 or weight.shape != shape or largest.numel() != shape[0]:
        raise ModelError(f"A quantized int8 weight does not fit {tuple(shape)}.", where=where, fix=_AGAIN)
    layout = parts.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise UnsupportedModelError("An int8 weight in a GPU-specific layout is not supported.", where=where, fix=_FIX)
    return Int8Weight(weight, largest.float().view(-1, 1) / INT8_MAX)


def _read_fp8(parts: Mapping[str, Tensor], shape: torch.Size, block: tuple[int, int] | None, where: str) -> Tensor:
    weight = parts["weight"]
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else _part(parts, "weight_scale", where)
    if weight.dtype != torch.float8_e4m3fn:
        raise UnsupportedModelError(
            f"A quantized weight in {weight.dtype} is not supported; only float8_e4m3fn is.", where=where, fix=_FIX
        )
    if weight.shape != shape:
        raise ModelError(
            f"A quantized weight of shape {tuple(weight.shape)} does not fit {tuple(shape)}.", where=where, fix=_AGAIN
        )
    dense, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return dense.mul_(scale.flatten())
    if scale.numel() == shape[0] and scale.shape in ((shape[0],), (shape[0], 1)):
        return dense.mul_(scale.view(-1, 1))
    if block is None or scale.shape != (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
        raise UnsupportedModelError(
            f"The scales {tuple(scale.shape)} of a quantized weight {tuple(shape)} are neither per row nor per block.",
            where=where,
            fix=_FIX,
        )
    for index, row in enumerate(scale):
        dense[index * block[0] : (index + 1) * block[0]].mul_(row.repeat_interleave(block[1])[: shape[1]])
    return dense


def _part(parts: Mapping[str, Tensor], name: str, where: str) -> Tensor:
    if name not in parts:
        raise ModelError(f"A quantized weight is missing its {name}.", where=where, fix="Download the model again.")
    return parts[name]
