"""FlashAttention 4's way back for heads of 128, with dQ's product turned over.

The release forms dQ as dS K; as K' dS' the same kernel is 3 % faster over rows of 4,096 tokens, and 1 % over 2,048
(H200, 32/8 heads). It has a setting for that, but its own function does not pass it on, so its kernels are called one
by one here.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

SIZE = 128
"""Of a head. Others were not measured."""


@functools.cache
def package() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    boundaries: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of causal attention without a window, over rows [B, S, H, 128] or documents end to end [T, H, 128]; several query
    heads to a key head. `sums` are what the forward pass gave."""
    interface, config = package(), _config()
    dtype = interface.torch2cute_dtype_map[query.dtype]
    heads, key_heads = query.shape[-2], key.shape[-2]
    rows = _padded(query, config.m_block_size, boundaries)
    key_rows = _padded(query, config.n_block_size, boundaries)
    sequences = query.shape[:-3]
    d_query = query.new_empty(*sequences, heads, rows * SIZE, dtype=torch.float32)
    d_key, d_value = query.new_zeros(2, *sequences, key_heads, key_rows * SIZE, dtype=torch.float32)
    products, logarithms = query.new_empty(2, *sequences, heads, rows, dtype=torch.float32)
    interface._bwd_preprocess(
        out, gradient, products, sums, logarithms, d_query, boundaries, None, None, dtype, SIZE, SIZE,
        config.m_block_size, fake_mode=False,
    )  # fmt: skip
    _kernel(dtype, heads // key_heads, boundaries is not None)(
        query, key, value, gradient, logarithms, products, d_query, d_key, d_value, scale, boundaries, boundaries,
        *_NOTHING_ELSE, interface.AuxData(None, None), None, None,
    )  # fmt: skip
    query_side = config.m_block_size, config.AtomLayoutMdQ, config.dQ_swapAB
    key_side = config.n_block_size, config.AtomLayoutNdKV, config.dKV_swapAB
    of_query, of_key, of_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    for summed, gradients, factor, (block, atoms, swapped) in (
        (d_query, of_query, scale, query_side), (d_key, of_key, scale, key_side), (d_value, of_value, 1.0, key_side),
    ):  # fmt: skip
        interface._bwd_postprocess_convert(
            summed, gradients, factor, boundaries, None, interface._get_device_arch(), dtype, SIZE, block,
            config.num_wg * 128, atoms, swapped, fake_mode=False,
        )  # fmt: skip
    return of_query, of_key, of_value


_NOTHING_ELSE = (None,) * 7
"""No lengths in use, no window, no locks for an order of sums."""


@functools.cache
def _config() -> Any:
    config = package()._tile_size_bwd_sm90(SIZE, SIZE, True, False)
    return replace(config, dQ_swapAB=True)


def _padded(query: Tensor, block: int, boundaries: Tensor | None) -> int:
    """Rows of a sequence in whole blocks; or of all documents, each of which begins with a block."""
    tokens = query.shape[-3]
    return (tokens + (1 if boundaries is None else boundaries.shape[0]) * block - 1) // block * block


@functools.cache
def _kernel(dtype: Any, groups: int, packed: bool) -> Any:
    interface, config = package(), _config()
    kernel = interface.FlashAttentionBackwardSm90(
        dtype, SIZE, SIZE, groups, True,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO,
        PdS_stage=config.num_stages_PdS,
        SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB,
        dQ_swapAB=config.dQ_swapAB,
        AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV,
        AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=(config.num_wg + 1) * 128,
        dQ_single_wg=config.dQ_single_wg,
    )  # fmt: skip
    tensors = interface.make_fake_bwd_tensors(dtype, has_gqa=True, varlen_q=packed, varlen_k=packed)
    query, key, value, _, gradient, _, _, _, _, logarithms, products, d_query, d_key, d_value, _ = tensors
    ends = interface.fake_tensor(interface.Int32, (interface.cute.sym_int(),), divisibility=1) if packed else None
    stream = interface.cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return interface.cute.compile(
        kernel, query, key, value, gradient, logarithms, products, d_query, d_key, d_value, 1.0, ends, ends,
        *_NOTHING_ELSE, interface.AuxData(None, None), None, None, stream,
        options="--enable-tvm-ffi",
    )  # fmt: skip
