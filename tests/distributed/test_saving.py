"""Adapters, full models and merged models are saved byte-identical from every parallel mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.distributed.launching import run_ranks
from tests.distributed.saving_ranks import ALONE, KINDS, MODES, stack_position, write_inputs

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which all modes have saved the same state."""
    folder = tmp_path_factory.mktemp("saving")
    write_inputs(folder)
    for size in (1, 2, 4):
        run_ranks("saving_ranks", size, folder, size)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != ALONE])
def test_saved_and_merged_files_match_one_process(root: Path, mode: str, kind: str) -> None:
    expected, found = (contents(stack_position(name, kind, root)) for name in (ALONE, mode))
    trained = "model/model.safetensors" if "full" in kind else "adapter/adapter_model.safetensors"
    assert {trained, "merged/model.safetensors", "merged/config.json"} <= expected.keys()
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize("kind", ["full", "tied full"])
def test_one_process_saves_the_weights_it_loaded(root: Path, kind: str) -> None:
    given = load_file(root / kind / "model.safetensors")
    saved = load_file(stack_position(ALONE, kind, root) / "model" / "model.safetensors")
    assert given.keys() == saved.keys()
    assert all(np.array_equal(given[name], saved[name]) for name in given)
