"""Rank script of test_module_trainer: MultiGPUTrainer and pantheraml.distributed, which join the ranks themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml import distributed
from pantheraml.base.errors import ConfigError, NonFiniteError, PantheraError
from pantheraml.multi_gpu_trainer import AggregationMethod, MultiGPUTrainer

BATCH, EPOCHS, RATE, IGNORED = 3, 2, 0.1, -100
METHODS: dict[str, dict[str, Any]] = {
    "mean": {},
    "weighted": {"aggregation_weights": [1.0, 3.0]},
    "median": {},
}


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int) -> None:
        self._inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._inputs[index].sum(0, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self._inputs)


class Texts(Dataset[dict[str, Tensor]]):
    """Rows with very different numbers of target tokens; the last three have none."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 7 if index < 9 else 8] = IGNORED
        return {"input_ids": ids, "labels": labels}


def pair_loader(batch: int, samples: int = 21) -> DataLoader[Any]:
    return DataLoader(Pairs(samples), batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(7))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_causal() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def flat(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return values


def sgd(**arguments: Any) -> dict[str, Any]:
    return {"class": torch.optim.SGD, "kwargs": {"lr": RATE, "momentum": 0.5, **arguments}}


def train_pairs(method: str) -> dict[str, Any]:
    with MultiGPUTrainer(
        make_net(),
        num_gpus=2,
        optimizer_config=sgd(),
        aggregation_method=AggregationMethod(method),
        loss_fn=nn.MSELoss(),
        **METHODS[method],
    ) as trainer:
        trainer.setup()
        trainer.setup()
        loader = pair_loader(BATCH)
        stats = [trainer.train_epoch(loader) for _ in range(EPOCHS)]
    return {"weights": flat(trainer.model), "stats": stats}


def train_texts() -> dict[str, Any]:
    with MultiGPUTrainer(make_causal(), optimizer_config=sgd()) as trainer:
        trainer.setup()
        stats = trainer.train_epoch(DataLoader(Texts(), batch_size=BATCH))
    return {"weights": flat(trainer.model), "stats": [stats]}


def train_nan() -> str:
    """One rank has a NaN: every rank stops with the same error, and the weights stay."""
    model = make_net()
    before = flat(model)
    rank = distributed.get_rank()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets) * (torch.nan if rank == 1 else 1.0)

    with MultiGPUTrainer(model, optimizer_config=sgd(), loss_fn=loss) as trainer:
        trainer.setup()
        try:
            trainer.train_epoch(pair_loader(BATCH))
        except NonFiniteError as err:
            assert flat(model) == before
            return err.what
    return "accepted"


def refused(call: Any) -> str:
    try:
        call()
    except PantheraError as err:
        return f"{type(err).__name__}: {err.what}"
    return "accepted"


def communicate() -> dict[str, Any]:
    assert distributed.is_distributed()
    not_joined = refused(distributed.barrier)
    world = distributed.setup()
    assert distributed.setup() == world
    rank = distributed.get_rank()
    found = {
        "not_joined": not_joined,
        "world": world,
        "rank": rank,
        "main": distributed.is_main_process(),
        "sent": distributed.broadcast({"from": rank}, src=1),
        "reduced": {op: distributed.all_reduce(rank + 1.0, op) for op in ("mean", "sum", "min", "max")},  # type: ignore[arg-type]
        "tensor": refused(lambda: distributed.broadcast(torch.ones(1) if rank == 0 else None)),
        "no_such_rank": refused(lambda: distributed.broadcast(1, src=2)),
    }
    distributed.barrier()
    distributed.cleanup()
    distributed.cleanup()
    assert not dist.is_initialized()
    return found


def main() -> None:
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    found: dict[str, Any] = {"communication": communicate()}
    found["pairs"] = {method: train_pairs(method) for method in METHODS}
    found["texts"] = train_texts()
    found["nan"] = train_nan()
    found["more"] = refused(lambda: MultiGPUTrainer(make_net(), num_gpus=3, optimizer_config=sgd()).setup())
    assert not dist.is_initialized()
    try:
        MultiGPUTrainer(make_net(), optimizer_config=sgd()).train_epoch(pair_loader(BATCH))
    except ConfigError as err:
        found["not_set_up"] = err.what
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
