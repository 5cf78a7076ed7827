"""The only place that reads or builds process environments.

Everything else asks here, so that one listing shows every variable that can change what PantheraML does.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pantheraml.base.errors import LaunchError
from pantheraml.base.worker_variables import is_for_workers


@dataclass(frozen=True)
class ProcessRank:
    """Where this process stands among its peers; a lone process is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None = None
    """How many of them are on this machine; None: nobody said."""


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks of a run find the key-value store through which they meet."""

    host: str
    port: int
    hosted_by_agent: bool
    """torchrun's agent hosts the store; otherwise rank 0 does."""
    attempt: int
    """How often the agent has started the ranks again."""
    file: Path | None = None
    """The store is this file, which all ranks of one node share, and host and port mean nothing."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.file is None else str(self.file)


def launched_rank() -> ProcessRank | None:
    """This process's rank, if torchrun, accelerate or Slurm started it as one of several; None for a lone process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        whose, missing = "the launcher", [name for name in names if name not in os.environ]
        here = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else None
    elif _number("SLURM_STEP_NUM_TASKS", default=1) > 1:
        # srun's own step; a plain batch script sees SLURM_NTASKS and SLURM_PROCID too, but nobody beside it
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        whose, missing = "Slurm", [name for name in names if name not in os.environ]
        here = _slurm_tasks_here()
    else:
        return None
    if missing:
        raise LaunchError(
            f"This process was started as one of several, but {whose} did not tell it {', '.join(missing)}.",
            todo=f"Start it with torchrun or accelerate launch, or set {', '.join(names)} on every process.",
        )
    rank, local_rank, world_size = (_number(name) for name in names)
    if not 0 <= rank < world_size:
        raise LaunchError(f"{names[0]}={rank} is not a rank of {names[2]}={world_size} processes.")
    return ProcessRank(rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=here)


def _slurm_tasks_here() -> int | None:
    """From how Slurm tells the tasks of all nodes, such as 2(x3),1; None where it does not."""
    node, tasks = os.environ.get("SLURM_NODEID", ""), os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(count) for count, times in found for _ in range(int(times or 1))]
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def process_rank() -> ProcessRank:
    return launched_rank() or ProcessRank(rank=0, local_rank=0, world_size=1)


def started_by_agent() -> bool:
    """Whether the parent of this process is an elastic agent (ours or torchrun's), without which it has no purpose."""
    return "TORCHELASTIC_RUN_ID" in os.environ


STORE_FILE = "PANTHERAML_STORE_FILE"
"""Set by the agent of one node for its ranks."""


def store_address() -> StoreAddress:
    attempt = _number("TORCHELASTIC_RESTART_COUNT", default=0)
    if os.environ.get(STORE_FILE):
        return StoreAddress("", 0, hosted_by_agent=True, attempt=attempt, file=Path(os.environ[STORE_FILE]))
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise LaunchError(
            "Several processes were started, but MASTER_ADDR and MASTER_PORT do not say where they meet.",
            todo="Set both to an address of the machine of rank 0 and a free port on it.",
        )
    return StoreAddress(
        host=host,
        port=_number("MASTER_PORT"),
        hosted_by_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=attempt,
    )


def store_variables(address: StoreAddress) -> dict[str, str]:
    """The same for a child, which an agent has started if that hosts the store."""
    names = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port)}
    if address.hosted_by_agent:
        names |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "pantheraml"}
    return names | {"TORCHELASTIC_RESTART_COUNT": str(address.attempt)}


def rank_variables(place: ProcessRank) -> dict[str, str]:
    """A rank in torchrun's words, for a child that is to be that rank; Slurm has other words."""
    names = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.world_size}
    if place.local_world_size is not None:
        names["LOCAL_WORLD_SIZE"] = place.local_world_size
    return {name: str(value) for name, value in names.items()}


def _number(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name, None if default is None else str(default))
    assert text is not None, name
    if not text.isdigit():
        raise LaunchError(f"The environment variable {name}={text!r} is not a number.")
    return int(text)


def multi_gpu_requested() -> bool:
    """`PANTHERAML_ENABLE_MULTIGPU=1`, or the name that scripts written for Unsloth know, switches several GPUs on."""
    own = os.environ.get("PANTHERAML_ENABLE_MULTIGPU")
    asked = os.environ.get("UNSLOTH_ENABLE_MULTIGPU", "") if own is None else own
    return asked not in ("", "0")


def processes_requested() -> int | None:
    """`PANTHERAML_NPROC`: how many processes a script starts itself as; None = one per GPU."""
    return _number("PANTHERAML_NPROC") if os.environ.get("PANTHERAML_NPROC") else None


def relaunch_allowed() -> bool:
    """`PANTHERAML_RELAUNCH=0` keeps a script in the process that it was started in."""
    return os.environ.get("PANTHERAML_RELAUNCH", "1") != "0"


def static_graph_forbidden() -> bool:
    """`UNSLOTH_DISABLE_DDP_STATIC_GRAPH=1`, a name that scripts written for Unsloth know."""
    return os.environ.get("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", "") not in ("", "0")


def was_relaunched() -> bool:
    """Whether this process is a rank that its own command line has started."""
    return "PANTHERAML_RELAUNCHED" in os.environ


def restarted_because() -> str | None:
    """`PANTHERAML_RESTARTED`: why the agent of this machine has started the same command line again, which therefore
    continues what it began; None: it has not."""
    return os.environ.get("PANTHERAML_RESTARTED")


def run_token() -> str | None:
    """`PANTHERAML_RUN_TOKEN`: the secret that the nodes of a run share, by which they know each other."""
    return os.environ.get("PANTHERAML_RUN_TOKEN") or None


def cache_root() -> Path:
    """Where tokenised data and compiled kernels are kept between runs (`PANTHERAML_CACHE`, else the XDG cache)."""
    own = os.environ.get("PANTHERAML_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pantheraml"


def debug_requested() -> bool:
    """`PANTHERAML_DEBUG=1` is the same as `--debug` on every command."""
    return os.environ.get("PANTHERAML_DEBUG", "") not in ("", "0")


NO_FOREIGN_CODE = "PANTHERAML_NO_FOREIGN_CODE"


def foreign_code_refused() -> bool:
    """`PANTHERAML_NO_FOREIGN_CODE=1`: no code that comes with a model and no pickled weights, whatever anybody asks."""
    return os.environ.get(NO_FOREIGN_CODE, "") not in ("", "0")


ALLOWED_ROOTS = "PANTHERAML_ALLOWED_ROOTS"


def allowed_roots() -> list[Path]:
    """`PANTHERAML_ALLOWED_ROOTS=/data:/models`: the folders that paths of a run must be in; none: anywhere."""
    return [Path(part) for part in os.environ.get(ALLOWED_ROOTS, "").split(os.pathsep) if part]


def faults_allowed() -> bool:
    """`PANTHERAML_FAULTS=1`: this is a test, and a configuration may ask for failures (`faults`)."""
    return os.environ.get("PANTHERAML_FAULTS", "") not in ("", "0")


def is_set(name: str) -> bool:
    """Whether the user, or whoever started this process, has said something there."""
    return bool(os.environ.get(name))


def visible_cuda_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def child_environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with `changes` applied (None removes a name), for a child process."""
    env = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def worker_environment(**changes: str | None) -> dict[str, str]:
    """What a worker of ours gets to see of this process's environment (`worker_variables`), with `changes` applied
    (None removes a name). `PANTHERAML_PASS_ENV` lists further names, separated by commas."""
    passed = [name.strip() for name in os.environ.get("PANTHERAML_PASS_ENV", "").split(",")]
    whole = child_environment(**changes)
    env = {name: value for name, value in whole.items() if name in changes or is_for_workers(name, passed)}
    if "PYTHONPATH" in env:  # an empty entry is the current folder
        env["PYTHONPATH"] = os.pathsep.join(filter(None, env["PYTHONPATH"].split(os.pathsep)))
    return env | {"PYTHONSAFEPATH": "1"}  # for what the worker starts in turn


def kernel_cache() -> dict[str, str]:
    """Where torch keeps compiled kernels, unless the user has said so: by itself below /tmp, in a folder whose name
    anybody can foresee and make first."""
    said = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # In a process that has imported torch, torch may have said it.
    if said and not said.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "inductor")}


def set_for_this_process(name: str, value: str) -> None:
    """For libraries that can only be told through the environment; called before they are imported."""
    os.environ[name] = value


def suggest_for_this_process(name: str, value: str) -> None:
    """The same, unless the user has said something else."""
    os.environ.setdefault(name, value)


def suggest_to_native_code(name: str, value: str) -> None:
    """For libraries that look into C's environment while they run, unless the user has said something else. It does not
    appear in `os.environ`, so that whoever puts that back as it was does not take it away."""
    if name not in os.environ:
        os.putenv(name, value)


@contextlib.contextmanager
def changed(values: Mapping[str, str]) -> Iterator[None]:
    """`set_for_this_process` for the length of a `with` block, also for the processes started in it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
