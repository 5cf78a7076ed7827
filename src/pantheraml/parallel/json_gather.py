"""All-gather and broadcast of plain data as JSON.

torch's object collectives unpickle what they receive, so anyone who gets into a connection between ranks could run code
on all of them. JSON carries only numbers, strings, lists and mappings.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order. Collective over `group`; tuples arrive as lists."""
    size = dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)], dtype=torch.int64, device=device), group=group)
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    rows = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group=group)
    return [json.loads(row[:count].cpu().numpy().tobytes()) for row, count in zip(rows, counts, strict=True)]


def broadcast_json(value: Any, src: int = 0) -> Any:
    """Return rank `src`'s value on every rank. Collective; numpy's and torch's scalars arrive as Python's."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None
    sends = dist.get_rank() == src
    sent = bytearray(json.dumps(value, default=lambda scalar: scalar.item()).encode()) if sends else bytearray()
    length = torch.tensor([len(sent)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=src)
    text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if sends:
        text.copy_(torch.frombuffer(sent, dtype=torch.uint8))
    dist.broadcast(text, src=src)
    return json.loads(text.cpu().numpy().tobytes())
