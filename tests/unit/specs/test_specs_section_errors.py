"""Config classes with wrong fields, as scripts set them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pantheraml import MultiGPUConfig, TrainConfig
from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import load_config
from pantheraml.specs.train import MethodConfig, StabilityConfig, TrainSettings

INPUTS: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (lambda: TrainSettings(max_step=1), "Did you mean `max_steps`?"),
        (lambda: TrainSettings(lr=1e-4), "Did you mean `learning_rate`?"),
        (lambda: TrainSettings(lora_alpha=8), "Did you mean `method.alpha`?"),
        (lambda: StabilityConfig(cliping="norm"), "Did you mean `clipping`?"),
        (lambda: TrainConfig(**INPUTS, trian={}), "Did you mean `train`?"),
        (lambda: TrainConfig(**INPUTS, lr=1e-4), "Did you mean `train.learning_rate`?"),
        (lambda: TrainConfig(**INPUTS, wrong=1), "Use one of its fields: model, data, method"),
        (lambda: TrainConfig(**INPUTS, train={"max_step": 1}), "Did you mean `max_steps`?"),
        (lambda: TrainConfig(**INPUTS, parallel={"shards": 2}), "Did you mean `shard`?"),
        (lambda: MultiGPUConfig(shards=2), "Did you mean `shard`?"),  # type: ignore[call-arg]
        (lambda: TrainSettings(max_steps="abc"), "`pantheraml schema` shows every field"),
        (lambda: MethodConfig(kind="loar"), "`pantheraml schema` shows every field"),
        (lambda: MultiGPUConfig(shard="x"), "`pantheraml schema` shows every field"),  # type: ignore[arg-type]
        (lambda: MultiGPUConfig(output_device=3), "`pantheraml schema` shows every field"),
        (lambda: TrainConfig(data=INPUTS["data"]), "`pantheraml schema` shows every field"),
    ],
)
def test_a_wrong_field_says_what_to_do(wrong: Callable[[], object], fix: str) -> None:
    with pytest.raises(ValidationError) as caught:  # a ValueError, as scripts catch it
        wrong()
    assert f"\n  fix: {fix}" in str(caught.value)
    assert "errors.pydantic.dev" not in str(caught.value)
    assert str(caught.value).count("fix:") == caught.value.error_count() == 1


def test_where_the_value_was_stays(tmp_path: Path) -> None:
    """Field and value are pydantic's, and a file's error says its line and gives one fix for all."""
    with pytest.raises(ValidationError) as caught:
        TrainConfig(**INPUTS, train={"max_steps": -1, "epoch": 2})
    found = {detail["loc"]: (detail["type"], detail["input"]) for detail in caught.value.errors()}
    assert found == {
        ("train", "max_steps"): ("greater_than_equal", -1),
        ("train", "epoch"): ("extra_forbidden", 2),
    }
    (tmp_path / "run.yaml").write_text("model: {path: m}\ndata: {path: d}\ntrain:\n  max_step: 1\n")
    with pytest.raises(ConfigError, match=r"`train.max_step` is not a known key \(.*line 4\)") as told:
        load_config(tmp_path / "run.yaml")
    assert str(told.value).count("fix:") == 1
