"""GPU tests run with `make gpu-test`; without a GPU all of them are skipped."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no GPU"))
