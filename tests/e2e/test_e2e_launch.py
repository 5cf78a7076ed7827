"""Every way to launch several ranks, with real processes; every failure is reported, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Ended, Playground, result_of, wait_until
from tests.event_log import raw_events

pytestmark = pytest.mark.extended

PAGE = Path(__file__).parents[2] / "docs/launching.md"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip


@dataclass(frozen=True)
class Starter:
    """Starts commands beside the playground's model and data."""

    playground: Playground

    def start(self, command: list[str], stdin: str | None = None, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.playground.root,
            env={**self.playground.environment, **environment},
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.playground.started.append(process)
        return process

    def __call__(self, command: list[str], stdin: str | None = None, **environment: str) -> Ended:
        return result_of(self.start(command, stdin, **environment), stdin)

    def script(self, name: str, code: str) -> list[str]:
        path = self.playground.root / name
        path.write_text(code)
        return [sys.executable, str(path)]

    def training(self, output: str, *arguments: str) -> list[str]:
        fixed = ["--model", self.playground.model, "--data", self.playground.data, "--device", "cpu"]
        sizes = ["data.seq_len=64", "train.global_batch_size=4", "train.max_steps=3", *arguments]
        return ["train", *fixed, "--output", output, *(word for size in sizes for word in ("--set", size))]


@pytest.fixture(scope="module")
def starter(playground: Playground) -> Starter:
    return Starter(playground)


def losses(playground: Playground, run: str) -> list[float]:
    return [event["loss"] for event in raw_events(playground.root / run) if event["kind"] == "train.step"]


# The command line as a rank -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_launch(starter: Starter) -> list[float]:
    """The losses of `pantheraml train --nproc 2`, which every other way must give too."""
    ended = starter.playground(*starter.training("runs/own"), "--nproc", "2")
    assert ended.code == 0, ended
    return losses(starter.playground, "runs/own")


@pytest.mark.seed("S0:146", "S0-040", "S0-041", "S0-042", "S0-076", "S0-077", "S2-053", "C10")
@pytest.mark.parametrize(
    "launcher", [[*TORCHRUN, "--standalone", "-m"], [*ACCELERATE, "-m"]], ids=["torchrun", "accelerate"]
)
def test_other_launchers(starter: Starter, own_launch: list[float], launcher: list[str], port: str) -> None:
    output = f"runs/{len(launcher)}"
    extra = ["--main_process_port", port] if "--multi_gpu" in launcher else []
    command = [*launcher[:-1], *extra, "-m", "pantheraml", *starter.training(output)]
    ended = starter(command)
    assert ended.code == 0, ended
    assert ended.out.count("Trained weights") == 1, "rank 0 speaks for all"
    assert losses(starter.playground, output) == own_launch
    events = raw_events(starter.playground.root / output)
    assert [e["world_size"] for e in events if e["kind"] == "train.started"] == [2]
    own, other = (starter.playground.root / run / "adapter/adapter_model.safetensors" for run in ("runs/own", output))
    assert own.read_bytes() == other.read_bytes()


def as_rank(rank: int, port: str) -> dict[str, str]:
    """Variables that a user sets to start ranks by hand."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port}  # fmt: skip


@pytest.mark.seed("S1-019", "S1-020")
def test_ranks_started_by_hand_and_an_error_in_the_data(starter: Starter, port: str) -> None:
    """Nobody ends rank 1 for us here: it must learn that rank 0 could not prepare. Settings say who is who."""
    bad = starter.playground.root / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\nnot JSON\n')
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    one, other = (
        starter.training(
            "runs/bad",
            f"data.path={bad}",
            *(f"parallel.{n}={v}" for n, v in (("world_size", 2), ("rank", rank), ("local_rank", rank))),
        )
        for rank in (0, 1)
    )
    started = starter.start([sys.executable, "-m", "pantheraml", *other], **where)
    first = starter([sys.executable, "-m", "pantheraml", *one], **where)
    second = result_of(started)
    assert first.code == 3, first
    assert "line 2" in first.err
    assert second.code == 3, second
    assert "Trained" not in second.out
    assert "Traceback" not in first.err + second.err


@pytest.mark.seed("S0-107")
def test_a_missing_rank_is_reported(starter: Starter, port: str) -> None:
    settings = starter.training("runs/lonely", "parallel.timeout_seconds=3")
    ended = starter([sys.executable, "-m", "pantheraml", *settings], **as_rank(0, port))
    assert ended.code == 6, ended
    assert "1 of 2 ranks joined within 3 s; missing: rank 1." in ended.err
    assert "Traceback" not in ended.err
    assert not (starter.playground.root / "runs/lonely/data.json").exists(), "ranks meet before data is prepared"


@pytest.mark.seed("S2-058")
def test_ranks_with_different_settings(starter: Starter, port: str) -> None:
    one, other = (
        [sys.executable, "-m", "pantheraml", *starter.training("runs/differ", f"train.seed={seed}")] for seed in (1, 2)
    )
    started = starter.start(other, **as_rank(1, port))
    first = starter(one, **as_rank(0, port))
    second = result_of(started)
    assert first.code == 2, first
    assert "Rank 1 was started with a different config" in first.err
    assert second.code in (2, 6), second


# A script that starts itself again ------------------------------------------------------------------------------------

LIGHT = """
import os, signal, sys, time
from pantheraml import enable_multi_gpu

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line of its own, also beside other ranks

say("started", os.environ.get("RANK"))
enable_multi_gpu({arguments})
say("rank", os.environ.get("RANK"), "of", os.environ.get("WORLD_SIZE"))
rank = os.environ.get("RANK")
{body}
"""
WAIT = """
try:
    open(f"ready-{rank}", "w").close()
    time.sleep(1000)
except KeyboardInterrupt:
    with open(f"interrupted-{rank}", "a") as file:
        file.write("once ")
    sys.exit(5)
"""


@pytest.mark.seed("S0-075", "C10")
def test_a_script_relaunches_once_with_the_exit_code_of_its_ranks(starter: Starter) -> None:
    body = """
open(f"here-{rank}", "w").close()
while rank == "1" and not os.path.exists("here-0"):
    time.sleep(0.05)
sys.exit(7 if rank == "1" else 0)
"""
    ended = starter(starter.script("light.py", LIGHT.format(arguments=2, body=body)))
    assert ended.code == 7, ended
    assert sorted(ended.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2", "started 0", "started 1", "started None"]
    assert "Rank 1 ended with status 7." in ended.err


def test_a_script_whose_rank_is_killed_names_it(starter: Starter) -> None:
    """And the other rank does not sleep to its end, for which the test would not wait."""
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else time.sleep(1000)"
    ended = starter(starter.script("light.py", LIGHT.format(arguments=2, body=body)))
    assert ended.code == 137, ended
    assert "Rank 1 was killed by SIGKILL" in ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_ranks_end_with_the_script(starter: Starter, number: signal.Signals) -> None:
    """Ranks have sessions of their own; that none is left when the script was killed is seen to after every test."""
    folder = starter.playground.root
    for name in ("ready", "interrupted"):
        for rank in (0, 1):
            (folder / f"{name}-{rank}").unlink(missing_ok=True)
    process = starter.start(starter.script("light.py", LIGHT.format(arguments=2, body=WAIT)))
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)))
    process.send_signal(number)
    ended = result_of(process)
    if number == signal.SIGINT:
        assert ended.code == 130, ended
        assert [(folder / f"interrupted-{rank}").read_text() for rank in (0, 1)] == ["once ", "once "]


@pytest.mark.seed("S0-121", "S2-003", "S2-081", "S2-082")
def test_when_a_script_stays_one_process(starter: Starter) -> None:
    """No GPU and no number; forbidden; or started as ranks already."""
    alone = "started None\nrank None of None\n"
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert starter(starter.script("light.py", LIGHT.format(arguments="", body="")), **hidden).out == alone
    command = starter.script("light.py", LIGHT.format(arguments=2, body=""))
    assert starter(command, PANTHERAML_RELAUNCH="0", **hidden).out == alone
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    refused = starter(command, **rank, **hidden)
    assert (refused.code != 0, refused.out) == (True, "started 0\n")
    assert "num_gpus=2 is set, but the launcher started 1 process(es)." in refused.err
    command = starter.script("light.py", LIGHT.format(arguments="", body=""))
    assert starter(command, **rank, **hidden).out == "started 0\nrank 0 of 1\n"


def test_code_from_standard_input_cannot_be_relaunched(starter: Starter) -> None:
    ended = starter([sys.executable, "-"], LIGHT.format(arguments=2, body=""), CUDA_VISIBLE_DEVICES="")
    assert ended.code == 1
    assert "it was not started from a file" in ended.err
    assert "pantheraml.multigpu.launch(function, nproc=2)" in ended.err


# Notebooks ------------------------------------------------------------------------------------------------------------

NOTEBOOK = """
import os
import torch
import torch.distributed as dist
from pantheraml.base.errors import PantheraError
from pantheraml.multigpu import launch

def add(number):
    dist.init_process_group("gloo")
    total = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), int(total)

def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("no good")
    dist.init_process_group("gloo")

print(launch(add, 10, nproc=2))
try:
    launch(fail, nproc=2)
except PantheraError as err:
    print(type(err).__name__, err)
print(os.environ.get("RANK"), sorted(name for name in os.environ if name.startswith("TORCHELASTIC")))
"""


@pytest.mark.parametrize("how", ["stdin", "-c"])
def test_launch_from_a_session_without_a_file(starter: Starter, how: str) -> None:
    command = [sys.executable, "-"] if how == "stdin" else [sys.executable, "-c", NOTEBOOK]
    ended = starter(command, NOTEBOOK if how == "stdin" else None)
    assert ended.code == 0, ended
    assert ended.out == "[(0, 21), (1, 21)]\nWorkerError Rank 1 failed: ValueError: no good.\nNone []\n"


def test_launch_of_a_function_of_a_module(starter: Starter) -> None:
    (starter.playground.root / "my_module.py").write_text("import os\ndef rank(): return os.environ['RANK']\n")
    code = "import my_module\nfrom pantheraml.multigpu import launch\n"
    ended = starter([sys.executable, "-c", code + "print(launch(my_module.rank, nproc=2))"])
    assert ended.out == "['0', '1']\n", ended
    ended = starter(
        [sys.executable, "-c", code + "my_module.rank.x = 1\nlaunch(my_module.rank, print, open('x', 'w'))"]
    )
    assert "cannot be sent to other processes" in ended.err


# The page -------------------------------------------------------------------------------------------------------------


@pytest.mark.seed("S0-068", "S2-054", "C18")
def test_the_page_runs(starter: Starter) -> None:
    """Its script with TRL's trainer, by the command that it gives for a machine without GPUs."""
    blocks = dict(re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL))
    root = starter.playground.root
    (root / "train.py").write_text(blocks["train.py"])
    command = blocks["script"].strip().replace("my-model", "model").replace("my-data", "data")
    ended = starter(["bash", "-c", command], PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert ended.code == 0, ended
    assert sorted(re.findall(r"rank \d of \d", ended.out)) == ["rank 0 of 2", "rank 1 of 2"]
    assert (root / "my-adapter/adapter_model.safetensors").is_file()
