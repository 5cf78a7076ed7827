"""The precision of a training config on a host without an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.hooks.old_trl_names import prepare_config_arguments


@pytest.mark.parametrize(
    ("accelerator", "given", "expected"),
    [
        (False, {}, {"use_cpu": True, "bf16": False}),
        (False, {"bf16": None, "fp16": None}, {"use_cpu": True, "bf16": False, "fp16": None}),
        (False, {"bf16": True}, {"bf16": True}),
        (False, {"use_cpu": True}, {"use_cpu": True}),
        (True, {}, {}),
    ],
)
def test_precision(
    accelerator: bool, given: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    prepare_config_arguments(given)
    assert given == expected
