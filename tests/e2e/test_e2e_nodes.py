"""`pantheraml train` on two nodes: two network namespaces, connected only to each other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheraml.base.events import Event
from tests.e2e.conftest import Ended, Playground, result_of
from tests.e2e.namespaces import ADDRESSES, two_hosts, within
from tests.event_log import raw_events

pytestmark = pytest.mark.extended

PORT = "29511"
"""A port of node 0, which has its own network namespace."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with two_hosts("machines") as names:
        yield names


def training(playground: Playground, output: str, *further: str) -> list[str]:
    fixed = ["--model", playground.model, "--data", playground.data, "--device", "cpu", "--output", output]
    sizes = ["data.seq_len=64", "train.global_batch_size=4", "train.max_steps=3"]
    return ["train", *fixed, *(word for size in sizes for word in ("--set", size)), *further]


def start(playground: Playground, before: list[str], *arguments: str, faults: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "pantheraml", *arguments],
        cwd=playground.root,
        env={**playground.environment, "PANTHERAML_FAULTS": faults},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    playground.started.append(process)
    return process


def on_both(playground: Playground, nodes: list[str], *arguments: str, faults: str = "") -> tuple[Ended, Ended]:
    """Run the same command on both nodes; node 1 starts first."""
    started = [
        start(
            playground,
            within(name),
            *(*arguments, "--nproc", "1", "--nnodes", "2", "--node-rank", str(number)),
            *("--rdzv", f"{ADDRESSES[0]}:{PORT}"),
            faults=faults,
        )
        for number, name in reversed(list(enumerate(nodes)))
    ]
    second, first = (result_of(process) for process in started)
    return first, second


@pytest.fixture(scope="module")
def undisturbed(playground: Playground, nodes: list[str]) -> tuple[Ended, Ended]:
    """A run on two nodes in `runs/nodes`."""
    return on_both(playground, nodes, *training(playground, "runs/nodes", "--set", "checkpoint.every_steps=1"))


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in raw_events(folder) if event["kind"] == "train.step"]


def ranks(folder: Path) -> list[Event]:
    return [event for event in raw_events(folder) if event["kind"] == "train.ranks"]


@pytest.mark.seed("S4-007", partly="over gloo, not over NCCL")
@pytest.mark.seed("S0-029", "S0-047")
@pytest.mark.seed("S0-005", "S0-095", "S3-063", "S4-013")
@pytest.mark.seed("S1-028", "S1-090", "S1-111", "S4-006", "S4-117", "S4-167")
def test_two_nodes_match_two_processes_on_one_node(playground: Playground, undisturbed: tuple[Ended, Ended]) -> None:
    first, second = undisturbed
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "Trained weights" in first.out
    assert "Trained weights" not in second.out
    unwatched = ["--set", "parallel.enable_multi_gpu_monitoring=false"]
    alone = result_of(start(playground, [], *training(playground, "runs/one-node", "--nproc", "2", *unwatched)))
    assert alone.code == 0, alone
    together = losses(playground.root / "runs/nodes")
    assert len(together) == 3
    assert together == pytest.approx(losses(playground.root / "runs/one-node"), rel=1e-6)
    watched, not_watched = (ranks(playground.root / run) for run in ("runs/nodes", "runs/one-node"))
    assert [event["step"] for event in watched] == [1, 2, 3]
    for event in watched:
        for name in ("tokens", "seconds", "memory_bytes"):
            assert len(event[name]) == 2
            assert min(event[name]) > 0
    assert not_watched == []


@pytest.mark.seed("S1-135", "S4-006")
def test_all_nodes_restart_after_a_kill_on_one(
    playground: Playground, nodes: list[str], undisturbed: tuple[Ended, Ended]
) -> None:
    """The run resumes from step 2 of the undisturbed one; in step 3, rank 1 is killed."""
    whole, folder = playground.root / "runs/nodes", playground.root / "runs/killed"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("adapter", "step-*3", "run.json", "report.html"))
    first, second = on_both(playground, nodes, "resume", "runs/killed", faults="1:3:kill")
    assert (first.code, second.code) == (0, 0), (first, second)
    (restart,) = [event for event in raw_events(folder) if event["kind"] == "run.restarted"]
    assert restart["message"] == (
        "Rank 1 was killed by SIGKILL (most often the kernel, out of memory). Resuming from step 2 (restart 1 of 3"
        " without a new checkpoint)."
    )
    assert (restart["step"], restart["world_size"]) == (2, 2)
    assert restart["message"] in first.err
    assert restart["message"] in second.err
    for file in (whole / "adapter").iterdir():
        assert (folder / "adapter" / file.name).read_bytes() == file.read_bytes()


def test_a_missing_node_is_reported(playground: Playground, port: str) -> None:
    """Node 0 listens on any free port; node 1 connects to one where nothing listens."""
    few = ["--set", "parallel.timeout_seconds=3"]
    started = [
        start(
            playground,
            [],
            *training(playground, f"runs/no-{number}", *few),
            *("--nnodes", "2", "--node-rank", str(number), "--rdzv", f"127.0.0.1:{rdzv_port}"),
        )
        for number, rdzv_port in enumerate(("0", port))
    ]
    expected = (
        "1 of 2 nodes joined within 3 s; missing: node 1.",
        "Node 1 of 2 could not reach the store at 127.0.0.1:",
    )
    for number, process in enumerate(started):
        alone = result_of(process)
        assert alone.code == 6, alone
        assert expected[number] in alone.err
        assert "Traceback" not in alone.err
        assert not (playground.root / f"runs/no-{number}").exists(), "the rendezvous comes before anything is written"
