"""Attention kernels over packed documents and over full rows: forward and backward of one layer.

The heads of Llama-3.1-8B in bf16. Documents have log-normal lengths and fill the rows; "mask" is torch's attention with
the [B, 1, S, S] mask that transformers builds for them (not timed), "boundaries" is our document attention with the
kernel it chooses. The kernels for full rows are timed one by one, so that `DENSE_BACKENDS` can be ordered by the
results, and so are those for packed documents: torch's, cuDNN's if torch has it, and FlashAttention 4 if installed.
Needs a GPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from recorded_calls import recorded
from table import Column, Table

TABLE = Table(
    title="Attention",
    how="One attention layer, forward and backward, heads of Llama-3.1-8B in bf16; median of the repeats; graph:"
    " replayed as a CUDA graph. Launched from Python, FlashAttention 4 takes longer than the others.",
    columns=(
        Column("rows", "parameters.rows"),
        Column("sequence", "parameters.width"),
        Column("documents", "documents"),
        Column("longest", "longest"),
        Column("attention", "attention"),
        Column("forward", "forward_seconds", lambda value: "-" if value is None else f"{1000 * value:.3f} ms"),
        Column("with backward", "seconds", lambda value: "-" if value is None else f"{1000 * value:.3f} ms"),
        Column("graph", "recorded", lambda value: "yes" if value else "no"),
        Column("peak memory", "peak_bytes", lambda value: "-" if value is None else f"{value / 2**20:.0f} MiB"),
        Column("note", "note", lambda value: value or ""),
    ),
)

NEEDS_GPU = True
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
SIGMA = 1.0
CALLS_A_REPEAT = 10

Attend = Callable[[Any, Any, Any], Any]
"""(query [B, H, S, D], key, value) -> output of any layout."""


def run(
    *, rows: int = 4, width: int = 2048, mean_length: int = 400, repeats: int = 20, seed: int = 0
) -> dict[str, Any]:
    import torch
    from torch.nn.attention import SDPBackend

    parameters = {"rows": rows, "width": width, "mean_length": mean_length, "repeats": repeats, "seed": seed}
    lengths = [_row(width, mean_length, seed + row) for row in range(rows)]
    packed = {"documents": sum(map(len, lengths)), "longest": max(map(max, lengths))}
    whole = {"documents": rows, "longest": width}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = _tensors(rows, width, device)
    results = []
    ways = _packed_ways(lengths, device)
    last = ways.pop("cuDNN")  # in a CUDA graph: illegal memory access, after which nothing runs (torch 2.11)
    for name, attend in ways.items():
        results.append({**packed, "attention": f"documents: {name}", **_measure(attend, tensors, repeats)})
    backends = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for name, backend in backends.items():
        results.append({**whole, "attention": f"rows: {name}", **_measure(_rows_by(backend), tensors, repeats)})
    results.append({**whole, "attention": "rows: flash-attn-4", **_measure(_flash_4(None), tensors, repeats)})
    results.append({**whole, "attention": "rows: as chosen", **_measure(_ours(None, width), tensors, repeats)})
    results.append({**packed, "attention": "documents: cuDNN", **_measure(last, tensors, repeats, record=False)})
    return {"parameters": parameters, "results": results}


def _row(width: int, mean: int, seed: int) -> list[int]:
    """Document lengths that fill one row; the last is truncated."""
    import numpy as np

    draw = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := width - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)))))
    return lengths


def _tensors(rows: int, width: int, device: str) -> tuple[Any, Any, Any]:
    """Query, key and value as views of one buffer, as after a merged projection; detached from it, because a captured
    backward cannot continue into operations outside the graph."""
    import torch

    torch.manual_seed(0)
    heads = HEADS + 2 * KEY_HEADS
    buffer = torch.randn(rows, width, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    parts = buffer.transpose(1, 2).split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
    query, key, value = (part.detach().requires_grad_() for part in parts)
    return query, key, value


def _packed_ways(lengths: list[list[int]], device: str) -> dict[str, Attend]:
    import itertools

    import torch
    import torch.nn.functional as F

    from pantheraml.models.attention_kernels import varlen_attention
    from pantheraml.models.document_layout import DocumentLayout

    flat = [length for row in lengths for length in row]
    boundaries = torch.tensor([0, *itertools.accumulate(flat)], dtype=torch.int32, device=device)
    spare = 1 << (len(flat) - 1).bit_length()
    padded = torch.cat([boundaries, boundaries[-1:].expand(spare - len(flat))])
    positions = torch.cat([torch.full((length,), number) for number, length in enumerate(flat)]).view(len(lengths), -1)
    same = (positions[:, :, None] == positions[:, None, :]).tril()[:, None].to(device)

    def mask(query: Any, key: Any, value: Any) -> Any:
        key, value = (t.repeat_interleave(HEADS // KEY_HEADS, dim=1) for t in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=same)

    def torchs(query: Any, key: Any, value: Any) -> Any:
        layout = DocumentLayout(boundaries, max(flat))
        return varlen_attention(query, key, value, layout, window=None, scaling=None)

    def cudnn(query: Any, key: Any, value: Any) -> Any:
        flattened = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
        longest = max(flat)
        operator = torch.ops.aten._cudnn_attention_forward
        return operator(*flattened, None, boundaries, boundaries, longest, longest, True, 0.0, True, False)[0]

    return {
        "mask": mask,
        "boundaries": _ours(boundaries, max(flat)),
        "boundaries, padded as in training": _ours(padded, max(flat)),
        "boundaries, padded as in compiled code": _ours(padded, sum(lengths[0])),
        "torch": torchs,
        "cuDNN": cudnn,
        "flash-attn-4": _flash_4(boundaries),
        "flash-attn-4, padded as in training": _flash_4(padded),
    }


def _ours(boundaries: Any, longest: int) -> Attend:
    from torch import nn

    from pantheraml.models.attention import document_attention
    from pantheraml.models.document_layout import DocumentLayout

    module, arguments = nn.Module(), DocumentLayout(boundaries, longest).arguments()
    return lambda query, key, value: document_attention(module, query, key, value, None, **arguments)[0]


def _flash_4(boundaries: Any) -> Attend:
    from pantheraml.models import flash

    return lambda query, key, value: flash.attend(query, key, value, boundaries, window=None, scaling=None)


def _rows_by(backend: Any) -> Attend:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(query: Any, key: Any, value: Any) -> Any:
        grouped = backend != SDPBackend.EFFICIENT_ATTENTION  # does not support grouped heads
        if not grouped:
            key, value = (t.repeat_interleave(HEADS // KEY_HEADS, dim=1) for t in (key, value))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    return attend


def _measure(attend: Attend, tensors: tuple[Any, Any, Any], repeats: int, *, record: bool = True) -> dict[str, Any]:
    import torch

    def forward() -> None:
        with torch.no_grad():
            attend(*tensors)

    def both() -> None:
        out = attend(*tensors)
        torch.autograd.grad(out, tensors, out.detach())

    try:
        forward_seconds, _ = _seconds(forward, repeats, record)
        seconds, is_captured = _seconds(both, repeats, record)
    except (RuntimeError, ImportError) as err:  # kernel not available in this torch or on this device
        missing = {"forward_seconds": None, "seconds": None, "peak_bytes": None}
        return missing | {"note": (str(err).strip() or type(err).__name__).splitlines()[0]}
    times: dict[str, Any] = {"forward_seconds": forward_seconds, "seconds": seconds, "recorded": is_captured}
    return times | {"peak_bytes": _peak_bytes(both), "note": None}


def _seconds(call: Callable[[], None], repeats: int, record: bool) -> tuple[float, bool]:
    """Seconds per call, and whether in a CUDA graph; each repeat times several calls."""

    def calls() -> None:
        for _ in range(CALLS_A_REPEAT):
            call()

    calls()
    graph = recorded(calls) if record else None
    several = graph or calls
    times = []
    for _ in range(repeats + 2):
        _synchronize()
        begin = time.perf_counter()
        several()
        _synchronize()
        times.append((time.perf_counter() - begin) / CALLS_A_REPEAT)
    return statistics.median(times[2:]), graph is not None


def _peak_bytes(call: Callable[[], None]) -> int | None:
    """Peak memory on top of the inputs; None on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
