"""Ranks exchange JSON, and nothing received from a peer is unpickled."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

import pantheraml
from pantheraml.base.errors import LaunchError
from pantheraml.engine.step.pipeline_step import KnownShapesStage
from pantheraml.parallel.json_gather import all_gather_json

SAFE = "weights_only=True"
UNPICKLES = re.compile(r"(gather|broadcast|scatter|send|recv)_object(_list)?\(|pickle\.loads?\(|torch\.load\(")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [None, "", "größer", [1, "a", None], {"layer.0": 0.1 + 0.2}, float("inf"), []])
def test_json_round_trip(value: object) -> None:
    assert all_gather_json(value) == [value]


@pytest.mark.usefixtures("alone")
def test_objects_are_not_serialized() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        all_gather_json(Path("x"))


def test_nothing_from_a_peer_is_unpickled() -> None:
    """The one exception: the dump of torch's flight recorder in this process. `weights_only` runs no code."""
    root = Path(pantheraml.__file__).parent
    found = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if (lines := [line for line in path.read_text().splitlines() if UNPICKLES.search(line) and SAFE not in line])
    }
    own_recorder = found.pop("engine/guard/watchdog.py")
    assert len(own_recorder) == 1
    found = {name: [line for line in lines if "def " not in line] for name, lines in found.items()}
    assert json.dumps({name: lines for name, lines in found.items() if lines}) == "{}"


def test_pipeline_stage_does_not_unpickle_shapes() -> None:
    """torch exchanges shapes as pickles if a stage does not know them."""
    assert "recv_object_list" in inspect.getsource(PipelineStage._recv_meta)
    with pytest.raises(LaunchError, match="which all stages already know"):
        KnownShapesStage._recv_meta(cast(KnownShapesStage, None), 1)
