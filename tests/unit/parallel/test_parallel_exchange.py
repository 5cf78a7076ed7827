"""What ranks tell each other is data, and stays data."""

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
from pantheraml.engine.pipeline_run import KnownShapesStage
from pantheraml.parallel.exchange import all_gather_json

UNPICKLES = re.compile(r"_object(_list)?\(|pickle\.loads?\(|torch\.load\(")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [None, "", "größer", [1, "a", None], {"layer.0": 0.1 + 0.2}, float("inf"), []])
def test_what_arrives_is_what_was_sent(value: object) -> None:
    assert all_gather_json(value) == [value]


@pytest.mark.usefixtures("alone")
def test_an_object_is_not_sent() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        all_gather_json(Path("x"))


def test_nothing_that_a_peer_sends_is_unpickled() -> None:
    """The one exception is what torch's flight recorder says of this very process."""
    root = Path(pantheraml.__file__).parent
    found = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if (lines := [line for line in path.read_text().splitlines() if UNPICKLES.search(line)])
    }
    own_recorder = found.pop("engine/guard/collectives.py")
    assert len(own_recorder) == 1
    known_names = re.compile(r"def |_as_object|_not_an_object")
    found = {name: [line for line in lines if not known_names.search(line)] for name, lines in found.items()}
    assert json.dumps({name: lines for name, lines in found.items() if lines}) == "{}"


def test_a_pipeline_stage_does_not_unpickle_shapes() -> None:
    """torch asks for them where stages do not know them, or somebody says that one does not."""
    assert "recv_object_list" in inspect.getsource(PipelineStage._recv_meta)
    with pytest.raises(LaunchError, match="shapes that all stages know"):
        KnownShapesStage._recv_meta(cast(KnownShapesStage, None), 1)
