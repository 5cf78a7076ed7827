"""Options of multi-node runs, and the number of ranks per node."""

from __future__ import annotations

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.cli.main import build_parser, main
from pantheraml.cli.train import resume_overrides
from pantheraml.launch.nodes import Assignment, NodeSpec, processes_here
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.train import TrainConfig


def test_rendezvous_address() -> None:
    assert NodeSpec.from_options(2, 1, "node0:29500") == NodeSpec(2, 1, "node0", 29500)
    assert NodeSpec.from_options(2, 0, "[fd00::1]:29500").host == "fd00::1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((1, 0, "a:1"), "is not a multi-node run"),
        ((2, None, "a:1"), "needs --node-rank"),
        ((2, 2, "a:1"), "from 0 to 1"),
        ((2, 0, None), "needs --rdzv HOST:PORT"),
        ((2, 0, "here"), "needs --rdzv HOST:PORT"),
        ((2, 0, "here:port"), "needs --rdzv HOST:PORT"),
    ],
)
def test_incomplete_options(options: tuple[int, int | None, str | None], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        NodeSpec.from_options(*options)


def test_options_without_nnodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "m", "--data", "d", "--rdzv", "a:1"]) == ConfigError.exit_code
    assert "are for several nodes" in capsys.readouterr().err


def test_a_resumed_run_takes_its_world_size_from_the_nodes() -> None:
    several = ["--nnodes", "2", "--node-rank", "0", "--rdzv", "a:1"]
    arguments = build_parser().parse_args(["resume", "run", "--nproc", "4", *several])
    assert resume_overrides(arguments)["parallel", "world_size"] is None


def test_assignment_json_round_trip() -> None:
    assignment = Assignment(NodeSpec(2, 1, "fd00::1", 29500), 8, "/runs/a b", 300, 3, ("killed", "hung"), 120)
    assert Assignment.from_json(assignment.to_json()) == assignment


def test_under_another_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    several = ["--nnodes", "2", "--node-rank", "0", "--rdzv", "a:1"]
    assert main(["train", "--model", "m", "--data", "d", *several]) == ConfigError.exit_code
    assert "another launcher has started this one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "gpus", "requested", "expected"),
    [({}, 4, None, 4), ({}, 4, 2, 2), ({}, 0, None, 1), ({"device": "cpu"}, 4, None, 1),
     ({"parallel": {"device_ids": [1, 3]}}, 4, None, 2)],
)  # fmt: skip
def test_ranks_per_node(settings: dict[str, object], gpus: int, requested: int | None, expected: int) -> None:
    gpu = {"name": "Test GPU", "total_bytes": None, "free_bytes": None, "compute_capability": None}
    found = tuple(GPU.model_validate({"index": index, **gpu}) for index in range(gpus))
    devices = DeviceSpec(gpus=found, cpu_count=8, ram_bytes=1, driver=None)
    config = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **settings})
    assert processes_here(config, devices, requested) == expected
