from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets.utils.logging import disable_progress_bar

from tests import toy
from tests.unit.models.conftest import _quiet_transformers, tiny_model

__all__ = ["_quiet_transformers", "tiny_model"]


@pytest.fixture(scope="session")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with weights large enough for losses to differ between tokens; nobody writes into its folder."""
    disable_progress_bar()
    return toy.write_llama(tmp_path_factory.mktemp("wide") / "model", hidden_size=64, initializer_range=0.2)


@pytest.fixture
def restored_environment() -> Iterator[None]:
    """Trainers write to the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
