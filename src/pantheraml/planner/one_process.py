"""One process with several devices: a copy of the model on each (DataParallel), or its layers spread over them.

Both are for those who ask for them; what the planner chooses by itself is one process per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.plan import GPU, LayerSplit
from pantheraml.specs.train import ModelConfig, TrainConfig

STRATEGIES = ("auto", "balanced", "sequential")

GPUs = tuple[GPU, ...]


@dataclass(frozen=True)
class OneProcess:
    """How one process uses its devices; by default each process has one."""

    gpus: GPUs
    """Those that are used, the one that batches go to first."""
    copies: bool = False
    split: LayerSplit | None = None
    reason: str | None = None
    """Of what `model.device_map` comes to; None: it was not given."""

    @property
    def several(self) -> str | None:
        """Why what is made for a model on one device is left out; None: the model is on one."""
        if self.copies:
            return "copies of the model are made anew for every batch"
        if self.split is not None and self.split.over_several:
            return "layers are on several devices"
        return None


def names_cpu_alone(model: ModelConfig) -> bool:
    """Whether the device map leaves nothing for a GPU."""
    named = _named(model)
    return bool(named) and set(named.values()) == {"cpu"}


def wants_one_process(config: TrainConfig) -> bool:
    """Whether a device map decides that there is one process, because nobody asked for more."""
    parallel = config.parallel
    degrees = (parallel.replicate, parallel.shard, parallel.tensor, parallel.pipeline, parallel.context)
    several = parallel.mode in (MultiGPUMode.DISTRIBUTED, MultiGPUMode.HYBRID) or any(d is not None for d in degrees)
    return config.model.device_map is not None and not several


def choose_one_process(config: TrainConfig, gpus: GPUs, world_size: int) -> OneProcess:
    """What `parallel.mode=dataparallel` and `model.device_map` mean on `gpus`, none on a CPU."""
    if config.parallel.mode is MultiGPUMode.DATAPARALLEL:
        return OneProcess(_copied_on(config, gpus), copies=True)
    if config.model.device_map is None:
        return OneProcess(gpus)
    if world_size > 1:
        return OneProcess(gpus, reason=_check_in_group(config, gpus))
    if config.model.device_map in STRATEGIES:
        return _by_strategy(config, gpus)
    return _by_name(config.model, gpus)


def check_copies(config: TrainConfig, frozen: str | None) -> None:
    """ConfigError for what copies of a model cannot have."""
    lacking = {
        f"weights packed in {frozen}": frozen is not None,
        "train.activation_checkpointing=offload": config.train.activation_checkpointing == "offload",
        "train.compile=on": config.train.compile == "on",
    }
    for what, asked in lacking.items():
        if asked:
            raise ConfigError(
                f"parallel.mode=dataparallel copies the model for every batch, which does not go with {what}.",
                todo="Use parallel.mode=distributed, which has one process per GPU, or leave that out.",
            )


def check_split(config: TrainConfig, one: OneProcess) -> None:
    """ConfigError for what layers on several devices cannot have."""
    if one.split is None or not one.split.over_several:
        return
    for what, asked in (
        ("train.activation_checkpointing=offload", config.train.activation_checkpointing == "offload"),
        ("train.compile=on", config.train.compile == "on"),
    ):
        if asked:
            raise ConfigError(
                f"{what} is for a model on one device, and model.device_map spreads it.", todo="Leave one of them out."
            )


def _copied_on(config: TrainConfig, gpus: GPUs) -> GPUs:
    batch, first = config.train.global_batch_size, config.parallel.output_device
    if len(gpus) < 2:
        raise DeviceError(
            f"parallel.mode=dataparallel needs at least two GPUs, but the run has {len(gpus)}.",
            todo="Use parallel.mode=none or auto.",
        )
    if batch < 2:
        raise ConfigError(
            "parallel.mode=dataparallel shares batches among GPUs, but a global batch is one sequence.",
            todo="Raise train.global_batch_size, or use parallel.mode=none.",
        )
    if first is not None:
        known = [gpu.index for gpu in gpus]
        if first not in known:
            raise DeviceError(
                f"parallel.output_device={first} is not among the GPUs of the run: {known}.",
                todo="Name one of them, or leave it out.",
            )
        gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index != first))
    return gpus[:batch]


def _check_in_group(config: TrainConfig, gpus: GPUs) -> str:
    """Every process of several has its own device, so a map may name that or nothing."""
    model = config.model
    own = {"cuda"} if gpus else {"cpu"}
    if not set(_named(model).values()) <= own:
        raise ConfigError(
            f"model.device_map={model.device_map} names devices, but the run has several processes, each of which has"
            " a device to itself.",
            todo="Leave model.device_map out, or run one process (parallel.mode=none).",
        )
    if model.max_memory is not None:
        raise ConfigError("model.max_memory is for one process, and the run has several.", todo="Leave it out.")
    return "each process has a device to itself"


def _by_strategy(config: TrainConfig, gpus: GPUs) -> OneProcess:
    model = config.model
    why = f"there is {'one' if gpus else 'no'} GPU"
    if config.parallel.mode is MultiGPUMode.NONE:
        gpus, why = gpus[:1], "parallel.mode is none, so there is one device"
    numbers = range(len(gpus))
    limits = {_local(name, numbers, "max_memory"): size for name, size in (model.max_memory or {}).items()} or None
    if len(gpus) > 1:
        split = LayerSplit.model_validate({"device_map": model.device_map, "max_memory": limits})
        return OneProcess(gpus, split=split, reason=f"one process spreads the layers over {len(gpus)} GPUs")
    whole = {"": "cuda:0" if gpus else "cpu"}
    return OneProcess(gpus, split=LayerSplit(device_map=whole, max_memory=limits) if limits else None, reason=why)


def _by_name(model: ModelConfig, gpus: GPUs) -> OneProcess:
    named, limits = _named(model), model.max_memory or {}
    # Batches go to the first GPU, so one that the map itself names has to be first.
    for field, names in (("device_map", named.values()), ("max_memory", limits.keys())):
        for name in names:
            _local(name, range(len(gpus)), field)
    numbers = list(dict.fromkeys(_index(name) for name in (*named.values(), *limits) if name != "cpu"))
    split = LayerSplit(
        device_map={module: _local(name, numbers, "device_map") for module, name in named.items()},
        max_memory={_local(name, numbers, "max_memory"): size for name, size in limits.items()} or None,
    )
    used = tuple(gpus[number] for number in numbers)
    if split.over_several:
        return OneProcess(used, split=split, reason="one process spreads the layers as the map says")
    # Names of modules can be checked only when the model is there.
    checked = split if limits or set(named) != {""} else None
    return OneProcess(used, split=checked, reason="the map names one device")


def _named(model: ModelConfig) -> dict[str, str]:
    """Module -> device, as far as the device map says that itself."""
    if model.device_map is None or model.device_map in STRATEGIES:
        return {}
    return {"": model.device_map} if isinstance(model.device_map, str) else dict(model.device_map)


def _local(name: str, numbers: Sequence[int], field: str) -> str:
    """The name that a device has in a process which sees only the GPUs of these `numbers`, in this order."""
    if name == "cpu":
        return name
    if _index(name) not in numbers:
        there = ", ".join(f"cuda:{number}" for number in numbers) or "none"
        raise DeviceError(
            f"model.{field} names {name}, which is not among the GPUs of the run: {there}.",
            todo="Correct it; `pantheraml gpus` lists the GPUs of this machine.",
        )
    return f"cuda:{numbers.index(_index(name))}"


def _index(name: str) -> int:
    return int(name.partition(":")[2] or 0)
