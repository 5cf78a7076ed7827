"""All access to environment variables.

No other module touches `os.environ`, so this file lists every variable that can change PantheraML's behavior.
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
from pantheraml.base.worker_variables import SECRET, is_for_workers


@dataclass(frozen=True)
class ProcessRank:
    """Rank of this process; a single process is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None = None
    """Number of ranks on this node; None: unknown."""


@dataclass(frozen=True)
class StoreAddress:
    """Address of the key-value store that the ranks use for rendezvous."""

    host: str
    port: int
    hosted_by_agent: bool
    """True: the process above the ranks provides the store; False: rank 0 hosts it."""
    attempt: int
    """Number of times the agent has restarted the ranks."""
    file: Path | None = None
    """File store shared by the ranks of one node; host and port are unused then."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.file is None else str(self.file)


def launched_rank() -> ProcessRank | None:
    """Return this process's rank as set by torchrun, accelerate or Slurm; None for a single process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        launcher, missing = "the launcher", [name for name in names if name not in os.environ]
        local_world_size = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else None
    elif _number("SLURM_STEP_NUM_TASKS", default=1) > 1:
        # Only srun sets the step's task count: a plain batch script has SLURM_NTASKS and SLURM_PROCID, but runs alone.
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        launcher, missing = "Slurm", [name for name in names if name not in os.environ]
        local_world_size = _slurm_local_tasks()
    else:
        return None
    if missing:
        raise LaunchError(
            f"This process is one rank of several, but {launcher} did not set {', '.join(missing)}.",
            fix=f"Start it with torchrun or accelerate launch, or set {', '.join(names)} on every process.",
        )
    rank, local_rank, world_size = (_number(name) for name in names)
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"{names[0]}={rank} is not a rank of {names[2]}={world_size} processes.",
            fix=f"Set {names[0]} from 0 to {names[2]} - 1, a different one for every process.",
        )
    return ProcessRank(rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size)


def _slurm_local_tasks() -> int | None:
    """Parse this node's task count from Slurm's list for all nodes, such as `2(x3),1`; None if it is not set."""
    node, tasks = os.environ.get("SLURM_NODEID", ""), os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def process_rank() -> ProcessRank:
    return launched_rank() or ProcessRank(rank=0, local_rank=0, world_size=1)


def started_by_agent() -> bool:
    """Return True if a process that ends all ranks together (ours or torchrun's) is the parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


STORE_FILE = "PANTHERAML_STORE_FILE"
"""Set by the process above the ranks of a single-node run (`launch.local_ranks`)."""


def store_address() -> StoreAddress:
    attempt = _number("TORCHELASTIC_RESTART_COUNT", default=0)
    if os.environ.get(STORE_FILE):
        return StoreAddress("", 0, hosted_by_agent=True, attempt=attempt, file=Path(os.environ[STORE_FILE]))
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise LaunchError(
            "Several processes were started, but MASTER_ADDR and MASTER_PORT are not set.",
            fix="Set them to the address of rank 0's node and a free port on it.",
        )
    return StoreAddress(
        host=host,
        port=_number("MASTER_PORT"),
        hosted_by_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=attempt,
    )


def store_variables(address: StoreAddress) -> dict[str, str]:
    """Return the variables that make `store_address` of a child process return `address`."""
    names = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port)}
    if address.hosted_by_agent:
        names |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "pantheraml"}
    return names | {"TORCHELASTIC_RESTART_COUNT": str(address.attempt)}


def rank_variables(rank: ProcessRank) -> dict[str, str]:
    """Return torchrun's variables for `rank`, also where Slurm's were set, for a child process."""
    names = {"RANK": rank.rank, "LOCAL_RANK": rank.local_rank, "WORLD_SIZE": rank.world_size}
    if rank.local_world_size is not None:
        names["LOCAL_WORLD_SIZE"] = rank.local_world_size
    return {name: str(value) for name, value in names.items()}


_OF_A_LAUNCH = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|NODE|ROLE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|PANTHERAML_(STORE_FILE|RELAUNCHED|RUN_TOKEN)|SLURM_(PROCID|LOCALID|STEP_NUM_TASKS)"
)


def outside_of_launch() -> dict[str, None]:
    """Return changes of a child's environment after which it is no rank of the launch that this process belongs to."""
    return {name: None for name in os.environ if _OF_A_LAUNCH.fullmatch(name)}


def _number(name: str, *, default: int | None = None) -> int:
    text = os.environ.get(name, None if default is None else str(default))
    assert text is not None, name
    if not text.isdigit():
        raise LaunchError(
            f"The environment variable {name}={text!r} is not a number.",
            fix=f"Set {name} to a whole number, or unset it.",
        )
    return int(text)


def multi_gpu_requested() -> bool:
    """`PANTHERAML_ENABLE_MULTIGPU=1` enables multi-GPU training; `UNSLOTH_ENABLE_MULTIGPU` is read if it is unset."""
    own = os.environ.get("PANTHERAML_ENABLE_MULTIGPU")
    value = os.environ.get("UNSLOTH_ENABLE_MULTIGPU", "") if own is None else own
    return value not in ("", "0")


def processes_requested() -> int | None:
    """`PANTHERAML_NPROC`: number of processes that a script relaunches itself as; None: one per GPU."""
    return _number("PANTHERAML_NPROC") if os.environ.get("PANTHERAML_NPROC") else None


def relaunch_allowed() -> bool:
    """`PANTHERAML_RELAUNCH=0` keeps a script from relaunching itself as several ranks."""
    return os.environ.get("PANTHERAML_RELAUNCH", "1") != "0"


def static_graph_forbidden() -> bool:
    """`UNSLOTH_DISABLE_DDP_STATIC_GRAPH=1` disables DDP's static graph; read for compatibility with Unsloth scripts."""
    return os.environ.get("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", "") not in ("", "0")


def was_relaunched() -> bool:
    """Return True if this process is a rank of a script that relaunched itself."""
    return "PANTHERAML_RELAUNCHED" in os.environ


@dataclass(frozen=True)
class ScriptFallback:
    """Why a script that had relaunched itself continues as one process."""

    planned: int
    """Number of processes that were started."""
    reason: str

    def __str__(self) -> str:
        return f"the script continues in one process instead of {self.planned}: {self.reason}"


FALLBACK = "PANTHERAML_FALLBACK"


def script_fallback() -> ScriptFallback | None:
    """`PANTHERAML_FALLBACK=4:rank 2 cannot use ...`, set by the ranks of a script for the one that continues alone."""
    planned, _, reason = os.environ.get(FALLBACK, "").partition(":")
    return ScriptFallback(int(planned), reason) if planned.isdigit() else None


def fallback_forbidden() -> bool:
    """`PANTHERAML_STRICT=1`: a script stops if a rank cannot use its device, as with `parallel.strict`."""
    return os.environ.get("PANTHERAML_STRICT", "") not in ("", "0")


def restarted_because() -> str | None:
    """`PANTHERAML_RESTARTED`: why the node's agent restarted this command, which then resumes the run; None: first
    start."""
    return os.environ.get("PANTHERAML_RESTARTED")


def run_token() -> str | None:
    """`PANTHERAML_RUN_TOKEN`: the shared secret by which the nodes of a run authenticate each other."""
    return os.environ.get("PANTHERAML_RUN_TOKEN") or None


def cache_root() -> Path:
    """Cache folder for tokenized data and compiled kernels (`PANTHERAML_CACHE`, else the XDG cache)."""
    own = os.environ.get("PANTHERAML_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pantheraml"


def debug_requested() -> bool:
    """`PANTHERAML_DEBUG=1` is the same as `--debug` on every command."""
    return os.environ.get("PANTHERAML_DEBUG", "") not in ("", "0")


def log_level() -> str | None:
    """`PANTHERAML_LOG`: lowest level that scripts log (debug, info, warning, error, off); None: not set."""
    return os.environ.get("PANTHERAML_LOG") or None


DATABASE_URL = "PANTHERAML_DATABASE_URL"


def database_url() -> str | None:
    """`PANTHERAML_DATABASE_URL`: database of the service. Other users of the host can read flags, but not this."""
    return os.environ.get(DATABASE_URL) or None


def service_url() -> str | None:
    """`PANTHERAML_URL`: where clients find the service; None: on this machine."""
    return os.environ.get("PANTHERAML_URL") or None


def api_key() -> str | None:
    """`PANTHERAML_API_KEY`: key of clients of the service. Other users of the host can read flags, but not this."""
    return os.environ.get("PANTHERAML_API_KEY") or None


def inference_key() -> str | None:
    """`PANTHERAML_INFERENCE_KEY`: key of the server that `pantheraml serve --inference-url` hands chat on to."""
    return os.environ.get("PANTHERAML_INFERENCE_KEY") or None


NO_FOREIGN_CODE = "PANTHERAML_NO_FOREIGN_CODE"


def foreign_code_refused() -> bool:
    """`PANTHERAML_NO_FOREIGN_CODE=1` forbids remote code and pickled weights, whatever a configuration or flag says."""
    return os.environ.get(NO_FOREIGN_CODE, "") not in ("", "0")


ALLOWED_ROOTS = "PANTHERAML_ALLOWED_ROOTS"


def allowed_roots() -> list[Path]:
    """`PANTHERAML_ALLOWED_ROOTS=/data:/models`: folders that all paths of a run must be in; empty: no restriction."""
    return [Path(part) for part in os.environ.get(ALLOWED_ROOTS, "").split(os.pathsep) if part]


FAULTS = "PANTHERAML_FAULTS"


def faults() -> list[str]:
    """`PANTHERAML_FAULTS=1:5:kill,0:7:nan`: failures to inject, for tests; empty: none (see `specs.faults`)."""
    return [part for part in os.environ.get(FAULTS, "").split(",") if part]


def is_set(name: str) -> bool:
    """Return True if the variable is set and not empty."""
    return bool(os.environ.get(name))


def visible_cuda_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


_SETTINGS = re.compile(r"(PANTHERAML|UNSLOTH|NCCL|GLOO|TORCH_NCCL)_\w+|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS")


def settings_in_environment() -> dict[str, str]:
    """Return the variables that change how ranks start, communicate and train here; secrets without their value."""
    given = {name: value for name, value in sorted(os.environ.items()) if _SETTINGS.fullmatch(name)}
    return {name: "(set)" if SECRET.search(name) else value for name, value in given.items()}


def child_environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment with `changes` applied (None removes a variable), for a child process."""
    env = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def worker_environment(**changes: str | None) -> dict[str, str]:
    """Return the environment of a worker: the allowed variables (`worker_variables`) with `changes` applied (None
    removes a variable). `PANTHERAML_PASS_ENV` lists further names, separated by commas."""
    extra = [name.strip() for name in os.environ.get("PANTHERAML_PASS_ENV", "").split(",")]
    everything = child_environment(**changes)
    env = {name: value for name, value in everything.items() if name in changes or is_for_workers(name, extra)}
    if "PYTHONPATH" in env:  # an empty entry means the current folder
        env["PYTHONPATH"] = os.pathsep.join(filter(None, env["PYTHONPATH"].split(os.pathsep)))
    return env | {"PYTHONSAFEPATH": "1"}  # also for the worker's own child processes


def kernel_cache() -> dict[str, str]:
    """Return the variable that points Inductor at our cache, unless the user set it.

    Torch's default is a folder in /tmp with a predictable name, which another user could create first.
    """
    current = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # Importing torch may have set the variable to its default.
    if current and not current.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "inductor")}


def set_for_this_process(name: str, value: str) -> None:
    """Set a variable that a library reads at import; call this before importing it."""
    os.environ[name] = value


def set_default_for_this_process(name: str, value: str) -> None:
    """Like `set_for_this_process`, unless the variable is set already."""
    os.environ.setdefault(name, value)


def set_native_default(name: str, value: str) -> None:
    """Set a variable for native code that calls getenv at run time, unless the user set it.

    It bypasses `os.environ`, so code that restores `os.environ` to an earlier state does not remove it.
    """
    if name not in os.environ:
        os.putenv(name, value)


@contextlib.contextmanager
def changed(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the duration of a `with` block; child processes started in it inherit them."""
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
