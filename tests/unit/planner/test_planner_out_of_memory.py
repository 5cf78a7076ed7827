from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.planner.choose import choose
from pantheraml.planner.model_shapes import ModelShapes, shapes_of_config
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
    return MemoryUse(**{**{name: size * GIB for name, size in values.items()}, "trainable_params": GIB, **changes})


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
    plain = {"activation_checkpointing": mode, "fused": "off"}
    text = "; ".join(advice(SHORTAGE, use(), *planned(train=plain)))
    assert " or ".join(f"train.activation_checkpointing={name}" for name in named) + f" (now {mode};" in text


LLAMA_1B = shapes_of_config(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
)


def test_fused_fp8_layers_are_not_told_to_checkpoint_selectively() -> None:
    ways = "; ".join(advice(SHORTAGE, use(), *planned()))
    assert "selective" not in ways
    assert "train.activation_checkpointing=full or train.activation_checkpointing=offload (now none" in ways


def test_savings_of_checkpointing_are_predicted_for_a_known_model() -> None:
    config, plan = planned(train={"micro_batch_size": 4, "global_batch_size": 4})
    ways = [way for way in advice(SHORTAGE, use(), config, plan, LLAMA_1B) if "checkpointing" in way]
    assert [way.split("=")[1].split(" ")[0] for way in ways] == ["full", "offload"]
    sizes = [float(way.split("saves about ")[1].split(" ")[0]) for way in ways]
    # 16 layers keep 6.1 GiB; recomputed, one of them, and 16 or 2 inputs of 32 MiB
    assert 5 < sizes[0] < sizes[1] < 6.1


def test_savings_of_an_unknown_model_have_no_numbers() -> None:
    config, plan = planned(train={"activation_checkpointing": "full"})
    ways = "; ".join(advice(SHORTAGE, None, config, plan, ModelShapes((), tied=False)))
    assert "train.activation_checkpointing=offload (now full; each needs less memory than the one before)" in ways
