from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.planner.choose import choose
from pantheraml.planner.fp8_layout_choice import layers_with_second_layout, layouts_for, why_single_layout
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.train import TrainConfig

GIB = 2**30
HOPPER = GPU(index=0, name="H200", total_bytes=140 * GIB, free_bytes=140 * GIB, compute_capability=(9, 0))
MACHINE = DeviceSpec(gpus=(HOPPER,), cpu_count=8, ram_bytes=64 * GIB, driver="580")


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


@pytest.mark.parametrize(
    ("sections", "layouts", "reason"),
    [
        ({}, 2, "one more byte per weight"),
        ({"train": {"activation_checkpointing": "full"}}, 1, "a second layout takes one byte per weight"),
        ({"train": {"activation_checkpointing": "selective"}}, 1, "activation_checkpointing=selective saves memory"),
        ({"model": {"path": "m", "precision": "bf16"}}, 1, "not in fp8"),
        ({"method": {"kind": "qlora"}}, 1, "not in fp8"),
        ({"method": {"kind": "full"}}, 1, "not in fp8"),
        ({"model": {"path": "m", "precision": "fp8"}, "train": {"fused": "off"}}, 1, "only fused layers"),
        ({"train": {"fp8_layouts": 1}}, 1, "as configured"),
        ({"train": {"fp8_layouts": 2, "activation_checkpointing": "full"}}, 2, "as configured"),
    ],
)
def test_fp8_layout_choice(sections: Any, layouts: int, reason: str) -> None:
    plan = choose(config(**sections), MACHINE)
    assert plan.fp8_layouts == layouts
    assert reason in plan.reason("train.fp8_layouts")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"method": {"kind": "qlora"}}, "not in fp8"),
        ({"model": {"path": "m", "precision": "fp8"}, "method": {"dropout": 0.1}}, "only fused layers"),
    ],
)
def test_unsupported_second_layout_is_refused(sections: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.fp8_layouts=2 is not possible: .*{reason}"):
        choose(config(**sections, train={"fp8_layouts": 2}), MACHINE)
    assert choose(config(**sections, train={"fp8_layouts": 1}), MACHINE).fp8_layouts == 1


def test_large_weights_keep_one_layout() -> None:
    assert why_single_layout(10 * GIB, 80 * GIB) is None
    reason = why_single_layout(10 * GIB + 1, 80 * GIB)
    assert reason is not None
    assert "20.0 GiB" in reason
    assert "80.0 GiB" in reason
    assert why_single_layout(10 * GIB, None) is None, "unknown device memory"


def test_layouts_for_each_checkpointing_mode() -> None:
    assert [layouts_for(mode)[0] for mode in ("none", "selective", "full", "offload")] == [2, 1, 1, 1]


def test_second_layouts_take_at_most_three_quarters_of_the_weights() -> None:
    assert layers_with_second_layout(32, 6979, 5637) == 30, "Llama-3.1-8B, in millions of weights"
    assert layers_with_second_layout(2, 100, 80) == 2
    assert layers_with_second_layout(40, 100, 60) == 40
    assert layers_with_second_layout(40, 100, 0) == 40
