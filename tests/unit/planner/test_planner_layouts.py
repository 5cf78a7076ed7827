from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.planner.choose import choose
from pantheraml.planner.layouts import layers_with_two, layouts_for, too_large_for_two
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
        ({}, 2, "one more byte each"),
        ({"train": {"activation_checkpointing": "full"}}, 1, "a second takes a byte a weight"),
        ({"train": {"activation_checkpointing": "selective"}}, 1, "is selective: memory is short"),
        ({"model": {"path": "m", "precision": "bf16"}}, 1, "not in fp8"),
        ({"method": {"kind": "qlora"}}, 1, "not in fp8"),
        ({"method": {"kind": "full"}}, 1, "not in fp8"),
        ({"model": {"path": "m", "precision": "fp8"}, "train": {"fused": "off"}}, 1, "only fused layers"),
        ({"train": {"fp8_layouts": 1}}, 1, "as configured"),
        ({"train": {"fp8_layouts": 2, "activation_checkpointing": "full"}}, 2, "as configured"),
    ],
)
def test_two_layouts_where_memory_is_not_short(sections: Any, layouts: int, reason: str) -> None:
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
def test_two_that_cannot_be_are_refused(sections: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.fp8_layouts=2 is not possible: .*{reason}"):
        choose(config(**sections, train={"fp8_layouts": 2}), MACHINE)
    assert choose(config(**sections, train={"fp8_layouts": 1}), MACHINE).fp8_layouts == 1


def test_weights_that_twice_take_more_than_a_quarter_stay_in_one() -> None:
    assert too_large_for_two(10 * GIB, 80 * GIB) is None
    reason = too_large_for_two(10 * GIB + 1, 80 * GIB)
    assert reason is not None
    assert "20.0 GiB" in reason
    assert "80.0 GiB" in reason
    assert too_large_for_two(10 * GIB, None) is None, "it is not known"


def test_the_rule_is_the_same_outside_of_plans() -> None:
    assert [layouts_for(mode)[0] for mode in ("none", "selective", "full", "offload")] == [2, 1, 1, 1]


def test_second_layouts_take_about_three_quarters_of_the_first() -> None:
    assert layers_with_two(32, 6979, 5637) == 30, "Llama-3.1-8B, in millions of weights"
    assert layers_with_two(2, 100, 80) == 2
    assert layers_with_two(40, 100, 60) == 40
    assert layers_with_two(40, 100, 0) == 40
