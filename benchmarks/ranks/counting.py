"""Count collectives and sends in torch's dispatcher, below DDP, FSDP2, DTensor and pipelines.

All process group communication passes the dispatcher as an operator of `c10d` or `_c10d_functional`; on a CPU, backward
runs in the calling thread, so a dispatch mode sees the DDP reducer's operators too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, SEND, BROADCAST = "all-to-all", "send", "broadcast"

_SENT: dict[str, Callable[[float], float]] = {
    ALL_REDUCE: lambda others: 2 * others,
    ALL_GATHER: lambda others: others,
    REDUCE_SCATTER: lambda others: others,
    ALL_TO_ALL: lambda others: others,
    SEND: lambda others: 1.0,
    BROADCAST: lambda others: 1.0,
}
"""Bytes sent per byte of the full tensor, by a ring or directly; `others` is (n - 1)/n."""


class _Operator(NamedTuple):
    kind: str
    whole: int
    """Index of the argument that is the full tensor: input of a reduction or all-to-all, output of a gather."""


_OPERATORS = {
    "c10d::allreduce_": _Operator(ALL_REDUCE, 0),
    "c10d::allgather_": _Operator(ALL_GATHER, 0),
    "c10d::_allgather_base_": _Operator(ALL_GATHER, 0),
    "c10d::reduce_scatter_": _Operator(REDUCE_SCATTER, 1),
    "c10d::_reduce_scatter_base_": _Operator(REDUCE_SCATTER, 1),
    "c10d::alltoall_": _Operator(ALL_TO_ALL, 1),
    "c10d::alltoall_base_": _Operator(ALL_TO_ALL, 1),
    "c10d::broadcast_": _Operator(BROADCAST, 0),
    "c10d::send": _Operator(SEND, 0),
    "_c10d_functional::all_reduce": _Operator(ALL_REDUCE, 0),
    "_c10d_functional::all_reduce_": _Operator(ALL_REDUCE, 0),
    "_c10d_functional::reduce_scatter_tensor": _Operator(REDUCE_SCATTER, 0),
    "_c10d_functional::all_to_all_single": _Operator(ALL_TO_ALL, 0),
    "_c10d_functional::broadcast": _Operator(BROADCAST, 0),
}
_FUNCTIONAL_GATHER = "_c10d_functional::all_gather_into_tensor"
_SEND_NOTHING = {"c10d::recv_", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Transfer(NamedTuple):
    kind: str
    whole_bytes: int


class Sent(TorchDispatchMode):
    """Collectives and sends of this process while the mode is active, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[Transfer] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor decompose into plain tensors and collectives first
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name == _FUNCTIONAL_GATHER:
            self.transfers.append(Transfer(ALL_GATHER, _bytes(result)))
        elif name in _OPERATORS:
            operator = _OPERATORS[name]
            self.transfers.append(Transfer(operator.kind, _bytes(args[operator.whole])))
        elif name.startswith(("c10d::", "_c10d_functional::")) and name not in _SEND_NOTHING:
            raise NotImplementedError(f"{name} is not counted")
        return result

    def counts(self) -> dict[str, int]:
        return dict(Counter(transfer.kind for transfer in self.transfers))

    def whole_bytes(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for transfer in self.transfers:
            total[transfer.kind] += transfer.whole_bytes
        return dict(total)

    def sent_bytes(self, processes: int) -> int:
        """Bytes sent by this process, if every transfer is among `processes`."""
        others = (processes - 1) / processes
        return round(sum(_SENT[transfer.kind](others) * transfer.whole_bytes for transfer in self.transfers))


def _bytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))
