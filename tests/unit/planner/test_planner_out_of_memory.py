from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.planner.choose import choose
from pantheraml.planner.out_of_memory import MemoryUse, Shortage, advice, leaner_resume, memory_error
from pantheraml.specs.plan import GPU, DeviceSpec, Plan
from pantheraml.specs.train import TrainConfig

GIB = 2**30
HOPPER = GPU(index=0, name="H200", total_bytes=140 * GIB, free_bytes=140 * GIB, compute_capability=(9, 0))
MACHINE = DeviceSpec(gpus=(HOPPER,), cpu_count=8, ram_bytes=64 * GIB, driver="580")
SHORTAGE = Shortage(requested=2 * GIB, free=GIB, total=140 * GIB, compute_capability=(9, 0))


def planned(**sections: dict[str, Any]) -> tuple[TrainConfig, Plan]:
    base: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}
    config = TrainConfig.model_validate({**base, **sections})
    return config, choose(config, MACHINE)


def use(**changes: int) -> MemoryUse:
    values = {"frozen_weights": 16, "trained_weights": 1, "gradients": 1, "optimizer_states": 2, "activations": 100}
    other = {"second_layout": 0, "trainable_params": GIB}
    return MemoryUse(**{**{name: size * GIB for name, size in values.items()}, **other, **changes})


def test_error_reports_allocation_and_memory_use() -> None:
    error = memory_error(SHORTAGE, use(), *planned())
    assert isinstance(error, OutOfMemoryError)
    assert "tried to allocate 2.00 GiB with 1.00 GiB of 140.00 GiB free" in error.what
    assert "weights 17.00 GiB, gradients 1.00 GiB, optimizer states 2.00 GiB, activations 100.00 GiB" in error.what
    assert error.fix is not None
    assert "train.micro_batch_size=4 (now 8; saves about 50.00 GiB)" in error.fix


def test_unknown_sizes_are_left_out() -> None:
    error = memory_error(
        Shortage(requested=None, free=None, total=None), None, *planned(model={"path": "m", "precision": "bf16"})
    )
    assert error.what == "The GPU ran out of memory."
    assert error.fix is not None
    assert "saves" not in error.fix
    assert "fp8" not in error.fix, "the GPU's capability is unknown"
    assert Shortage(requested=None, free=GIB, total=2 * GIB).__str__() == ": 1.00 GiB of 2.00 GiB free"


def test_error_mentions_a_micro_batch_of_one() -> None:
    error = memory_error(SHORTAGE, None, *planned(train={"micro_batch_size": 1}))
    assert error.what.startswith("The GPU ran out of memory with a micro-batch of 1: tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("mode", "change"),
    [
        ("none", "train.activation_checkpointing=full"),
        ("full", "train.activation_checkpointing=offload"),
        ("offload", "parallel.shard=N"),
    ],
)
def test_leaner_resume_setting(mode: str, change: str) -> None:
    _, plan = planned(train={"activation_checkpointing": mode})
    assert leaner_resume(plan) == change


def test_second_layout_is_dropped_first() -> None:
    twice = use(second_layout=14 * GIB)
    assert str(twice).startswith("weights 31.00 GiB, ")
    ways = advice(SHORTAGE, twice, *planned())
    assert ways[0] == "train.fp8_layouts=1 (now 2; saves about 14.00 GiB)"
    assert any(
        "method.kind=qlora" in way and f"saves about {14 + 16 * (1 - 0.27 / 0.5):.2f} GiB" in way for way in ways
    )
    assert advice(SHORTAGE, None, *planned())[0] == "train.fp8_layouts=1 (now 2)"
    for one in (
        advice(SHORTAGE, use(), *planned()),  # the weights were too large for two
        advice(SHORTAGE, None, *planned(train={"fp8_layouts": 1})),
        advice(SHORTAGE, None, *planned(train={"activation_checkpointing": "selective"})),
    ):
        assert "fp8_layouts" not in "; ".join(one)


def test_saving_of_an_odd_micro_batch() -> None:
    ways = advice(SHORTAGE, use(activations=90 * GIB), *planned(train={"micro_batch_size": 3}))
    assert ways[0] == "train.micro_batch_size=1 (now 3; saves about 60.00 GiB)"


@pytest.mark.seed("S0-106", "S4-121", "S4-122", "S4-123")
@pytest.mark.parametrize(
    ("sections", "expected", "absent"),
    [
        ({}, ["method.kind=qlora"], ["model.precision", "adamw8bit"]),
        (
            {"model": {"path": "m", "precision": "bf16"}},
            ["model.precision=fp8 (now bf16; saves about 8.00 GiB)", "method.kind=qlora"],
            ["adamw8bit"],
        ),
        ({"model": {"path": "m", "precision": "fp8"}}, ["method.kind=qlora"], ["model.precision"]),
        ({"method": {"kind": "qlora"}}, ["seq_len"], ["qlora", "fp8"]),
        ({"method": {"kind": "dora"}}, ["method.kind=qlora"], ["fp8"]),
        (
            {"method": {"kind": "full"}},
            [
                "train.optimizer=adamw8bit (now adamw; saves about 6.00 GiB)",
                "train.weights=bf16 (now fp32; saves about 4.00 GiB)",
                "method.kind=lora",
            ],
            ["qlora", "fp8"],
        ),
        (
            {"method": {"kind": "full"}, "train": {"weights": "bf16", "optimizer": "adamw_bf16"}},
            ["train.optimizer=adamw8bit (now adamw_bf16; saves about 2.00 GiB)"],
            ["train.weights"],
        ),
        ({"train": {"micro_batch_size": 1}}, ["seq_len", "parallel.shard=N"], ["micro_batch_size"]),
        ({"train": {"activation_checkpointing": "offload"}}, ["seq_len"], ["activation_checkpointing"]),
    ],
)
def test_advice_lists_only_applicable_settings(
    sections: dict[str, Any], expected: list[str], absent: list[str]
) -> None:
    text = "; ".join(advice(SHORTAGE, use(), *planned(**sections)))
    assert all(part in text for part in expected), text
    assert not any(part in text for part in absent), text


@pytest.mark.parametrize(
    ("mode", "named"),
    [("none", ["selective", "full", "offload"]), ("selective", ["full", "offload"]), ("full", ["offload"])],
)
def test_stronger_checkpointing_modes_are_listed_in_order(mode: str, named: list[str]) -> None:
    text = "; ".join(advice(SHORTAGE, use(), *planned(train={"activation_checkpointing": mode})))
    assert " or ".join(f"train.activation_checkpointing={name}" for name in named) + f" (now {mode};" in text
