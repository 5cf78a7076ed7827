"""One process with several devices: DataParallel, or a model split by `model.device_map`.

Both must be requested; by default the planner chooses one process per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.plan import GPU, LayerSplit
from pantheraml.specs.train import SPLIT_STRATEGIES, ModelConfig, TrainConfig

GPUs = tuple[GPU, ...]


@dataclass(frozen=True)
class SingleProcess:
    """Devices of a process; by default each process has one."""

    gpus: GPUs
    """GPUs in use; batches go to the first."""
    copies: bool = False
    """DataParallel."""
    split: LayerSplit | None = None
    reason: str | None = None
    """Reason of the choice for `model.device_map`; None: it is not set."""

    @property
    def multi_device(self) -> str | None:
        """Why optimizations for a model on one device are off; None: the model is on one device."""
        if self.copies:
            return "DataParallel replicates the model for every batch"
        if self.split is not None and self.split.over_several:
            return "layers are on several devices"
        return None


def maps_to_cpu_only(model: ModelConfig) -> bool:
    """Return True if the device map uses no GPU."""
    devices = _explicit_map(model)
    return bool(devices) and set(devices.values()) == {"cpu"}


def wants_single_process(config: TrainConfig) -> bool:
    """Return True if there is a device map and no setting that needs several processes."""
    parallel = config.parallel
    degrees = (parallel.replicate, parallel.shard, parallel.tensor, parallel.pipeline, parallel.context)
    several = parallel.mode in (MultiGPUMode.DISTRIBUTED, MultiGPUMode.HYBRID) or any(d is not None for d in degrees)
    return config.model.device_map is not None and not several


def choose_single_process(config: TrainConfig, gpus: GPUs, world_size: int) -> SingleProcess:
    """Resolve `parallel.mode=dataparallel` and `model.device_map` on `gpus` (empty on CPU)."""
    if config.parallel.mode is MultiGPUMode.DATAPARALLEL:
        return SingleProcess(_dataparallel_gpus(config, gpus), copies=True)
    if config.model.device_map is None:
        return SingleProcess(gpus)
    if world_size > 1:
        return SingleProcess(gpus, reason=_check_in_group(config, gpus))
    if config.model.device_map in SPLIT_STRATEGIES:
        return _by_strategy(config, gpus)
    return _by_name(config.model, gpus)


def check_copies(config: TrainConfig, frozen: str | None) -> None:
    """ConfigError for settings that DataParallel does not support."""
    unsupported = {
        f"weights quantized to {frozen}": frozen is not None,
        "train.activation_checkpointing=offload": config.train.activation_checkpointing == "offload",
        "train.compile=on": config.train.compile == "on",
    }
    for what, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"parallel.mode=dataparallel replicates the model for every batch and does not support {what}.",
                fix="Use parallel.mode=distributed, which runs one process per GPU, or change that setting.",
            )


def check_split(config: TrainConfig, single: SingleProcess) -> None:
    """ConfigError for settings that a split model does not support."""
    if single.split is None or not single.split.over_several:
        return
    for what, is_set in (
        ("train.activation_checkpointing=offload", config.train.activation_checkpointing == "offload"),
        ("train.compile=on", config.train.compile == "on"),
    ):
        if is_set:
            raise ConfigError(
                f"{what} needs the model on one device, but model.device_map splits it.", fix="Remove one of them."
            )


def _dataparallel_gpus(config: TrainConfig, gpus: GPUs) -> GPUs:
    batch, first = config.train.global_batch_size, config.parallel.output_device
    if len(gpus) < 2:
        raise DeviceError(
            f"parallel.mode=dataparallel needs at least two GPUs, but the run has {len(gpus)}.",
            fix="Use parallel.mode=none or auto.",
        )
    if batch < 2:
        raise ConfigError(
            "parallel.mode=dataparallel splits batches over GPUs, but the global batch is one sequence.",
            fix="Raise train.global_batch_size, or use parallel.mode=none.",
        )
    if first is not None:
        known = [gpu.index for gpu in gpus]
        if first not in known:
            raise DeviceError(
                f"parallel.output_device={first} is not one of the GPUs of the run: {known}.",
                fix="Use one of these, or remove parallel.output_device.",
            )
        gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index != first))
    return gpus[:batch]


def _check_in_group(config: TrainConfig, gpus: GPUs) -> str:
    """ConfigError if the map of a multi-process run names devices: each rank has its own. Return the reason to show."""
    model = config.model
    own = {"cuda"} if gpus else {"cpu"}
    if not set(_explicit_map(model).values()) <= own:
        raise ConfigError(
            f"model.device_map={model.device_map} names devices, but the run has several processes with one device"
            " each.",
            fix="Remove model.device_map, or run one process (parallel.mode=none).",
        )
    if model.max_memory is not None:
        raise ConfigError(
            "model.max_memory is for one process, but the run has several.", fix="Remove model.max_memory."
        )
    return "each process has its own device"


def _by_strategy(config: TrainConfig, gpus: GPUs) -> SingleProcess:
    model = config.model
    why = f"there is {'one' if gpus else 'no'} GPU"
    if config.parallel.mode is MultiGPUMode.NONE:
        gpus, why = gpus[:1], "parallel.mode is none, so there is one device"
    numbers = range(len(gpus))
    limits = {_local(name, numbers, "max_memory"): size for name, size in (model.max_memory or {}).items()} or None
    if len(gpus) > 1:
        split = LayerSplit.model_validate({"device_map": model.device_map, "max_memory": limits})
        return SingleProcess(gpus, split=split, reason=f"one process splits the layers over {len(gpus)} GPUs")
    whole = {"": "cuda:0" if gpus else "cpu"}
    return SingleProcess(gpus, split=LayerSplit(device_map=whole, max_memory=limits) if limits else None, reason=why)


def _by_name(model: ModelConfig, gpus: GPUs) -> SingleProcess:
    devices, limits = _explicit_map(model), model.max_memory or {}
    # Batches go to the first GPU, so it must be one that the map names.
    for field, names in (("device_map", devices.values()), ("max_memory", limits.keys())):
        for name in names:
            _local(name, range(len(gpus)), field)
    numbers = list(dict.fromkeys(_index(name) for name in (*devices.values(), *limits) if name != "cpu"))
    split = LayerSplit(
        device_map={module: _local(name, numbers, "device_map") for module, name in devices.items()},
        max_memory={_local(name, numbers, "max_memory"): size for name, size in limits.items()} or None,
    )
    used = tuple(gpus[number] for number in numbers)
    if split.over_several:
        return SingleProcess(used, split=split, reason="one process splits the layers by the map")
    # Keep the split so that module names are checked once the model is loaded.
    checked = split if limits or set(devices) != {""} else None
    return SingleProcess(used, split=checked, reason="the map names one device")


def _explicit_map(model: ModelConfig) -> dict[str, str]:
    """Map module -> device if the device map names devices; empty for a strategy."""
    if model.device_map is None or model.device_map in SPLIT_STRATEGIES:
        return {}
    return {"": model.device_map} if isinstance(model.device_map, str) else dict(model.device_map)


def _local(name: str, numbers: Sequence[int], field: str) -> str:
    """Name of a device in a process that sees only the GPUs in `numbers`, in this order."""
    if name == "cpu":
        return name
    if _index(name) not in numbers:
        available = ", ".join(f"cuda:{number}" for number in numbers) or "none"
        raise DeviceError(
            f"model.{field} names {name}, which is not one of the GPUs of the run: {available}.",
            fix=f"Correct model.{field}; `pantheraml gpus` lists the GPUs of this machine.",
        )
    return f"cuda:{numbers.index(_index(name))}"


def _index(name: str) -> int:
    return int(name.partition(":")[2] or 0)
