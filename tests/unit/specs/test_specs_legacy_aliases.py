"""Keys of earlier versions that are gone: ignored with a warning, and neither stored nor listed."""

from __future__ import annotations

from typing import Any

import pytest

from pantheraml.planner.choose import choose
from pantheraml.specs.config_file import all_keys, json_schema, load_config, validate
from pantheraml.specs.legacy_aliases import REMOVED
from pantheraml.specs.plan import DeviceSpec, Plan
from pantheraml.specs.train import TrainSettings

REST: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}


@pytest.mark.parametrize("value", [1, 2])
def test_removed_key_warns_and_has_no_effect(value: int, caplog: pytest.LogCaptureFixture) -> None:
    given = validate({**REST, "train": {"fp8_layouts": value, "max_steps": 3}})
    (message,) = caplog.messages
    assert "train.fp8_layouts is deprecated: remove it, it has no effect" in message
    assert given == validate({**REST, "train": {"max_steps": 3}})
    assert "fp8_layouts" not in given.to_dict()["train"]
    assert TrainSettings(fp8_layouts=value) == TrainSettings()  # type: ignore[arg-type]
    load_config(None, {("model", "path"): "m", ("data", "path"): "d", ("train", "fp8_layouts"): value})
    assert len(caplog.messages) == 3


def test_run_folders_of_earlier_versions_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    assert validate({**REST, "train": {"fp8_layouts": "auto"}}) == validate(REST)
    assert not caplog.messages
    plan = choose(validate(REST), DeviceSpec(gpus=(), cpu_count=1, ram_bytes=1 << 30, driver=None))
    assert Plan.model_validate({**plan.model_dump(), "fp8_layouts": 2}) == plan


def test_removed_keys_are_not_listed() -> None:
    known = {".".join(key) for key in all_keys()}
    assert not known & REMOVED.keys()
    assert "fp8_layouts" not in json_schema()["$defs"]["TrainSettings"]["properties"]
