"""One process with several GPUs: a device map (naive model parallelism) or replicas (`nn.DataParallel`).

A device map is a strategy, a device, or a mapping module -> device. `place` resolves any of them to module -> device
from sizes alone, so it also works on a meta-device model; `split` then moves the layers, and accelerate's hooks move
the activations. Nothing is offloaded to host memory or disk implicitly: a model that does not fit is rejected.

    sequential       fills the first device, then the next
    balanced         gives every device about the same
    auto             balanced, or sequential if devices are too uneven for that

A split saves memory, not time: one device works while the others wait. `DataParallelLoss` is the other single-process
mode: each device holds a replica and gets some rows of each batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import psutil
import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import convert_file_size_to_int, find_tied_parameters, get_balanced_memory
from torch import Tensor, nn

from pantheraml.base.env import launched_rank, process_rank
from pantheraml.base.errors import ConfigError, DeviceError, OutOfMemoryError
from pantheraml.specs.plan import LayerSplit
from pantheraml.specs.train import SPLIT_STRATEGIES

Device = int | Literal["cpu"]
"""GPU index, or the host."""
DeviceName = int | str | torch.device
DeviceMap = DeviceName | Mapping[str, DeviceName]
MaxMemory = Mapping[Any, int | str]
"""DeviceName -> size, in bytes or as text such as "10GiB"."""

FOR_WEIGHTS = 0.9
"""Fraction of a GPU's free memory for weights; the rest is for activations, gradients and optimizer state. Lower it
with `max_memory`."""
_DOES_NOT_FIT: Any = "disk"  # accelerate's placement for modules that fit on no device
_FIX_MEMORY = (
    "Use more or larger devices, quantized weights (method.kind=qlora, model.precision=fp8), or parallel.shard."
)


def place(
    model: nn.Module,
    device_map: DeviceMap,
    devices: Mapping[Device, int],
    max_memory: MaxMemory | None = None,
) -> dict[str, Device]:
    """Resolve `device_map` to module name -> device for all of `model`.

    `devices` maps each usable device to the bytes that weights may take on it. With a single entry (multi-GPU off),
    every strategy means that device. `max_memory` lowers those limits (`"10GiB"`); strategies skip devices that it
    does not name.
    """
    limits = _limits(devices, max_memory)
    if isinstance(device_map, str) and device_map in SPLIT_STRATEGIES:
        return _by_strategy(model, device_map, limits)
    room = {**devices, **limits}
    if isinstance(device_map, Mapping):
        placement = {name: _device(device, room) for name, device in device_map.items()}
        _check_map(model, placement)
    else:
        placement = {"": _device(device_map, room)}
    _check_room(model, placement, room)
    return placement


def named_devices(device_map: DeviceMap, devices: Mapping[Device, int]) -> list[torch.device]:
    """Return the devices that a device map names, GPUs first; none for a strategy."""
    if isinstance(device_map, str) and device_map in SPLIT_STRATEGIES:
        return []
    names = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
    found = {_device(name, devices) for name in names}
    return [_as_torch(device) for device in sorted(found, key=lambda d: (1, 0) if d == "cpu" else (0, d))]


def place_in_group(device_map: DeviceMap | None, device: Device) -> dict[str, DeviceName]:
    """Return the device map of one rank of a process group: everything on its own `device`, for any strategy.

    A map that names other devices would put several ranks on one device, and is rejected.
    """
    whole: dict[str, DeviceName] = {"": device}
    if device_map is None or (isinstance(device_map, str) and device_map in SPLIT_STRATEGIES):
        return whole
    named = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
    if {_index(name) for name in named} <= {device, None}:
        return whole
    raise ConfigError(
        f"device_map={device_map!r} names devices other than {device!r}, the one device of this rank.",
        fix="Remove device_map, or run a single process.",
    )


def split(model: nn.Module, placement: Mapping[str, Device]) -> nn.Module:
    """Move `model`'s modules to their devices, in place. Parameters are replaced: create the optimizer afterwards."""
    used = list(dict.fromkeys(placement.values()))
    if len(used) == 1:
        return model.to(used[0])
    # Pass torch.device, not strings: accelerate treats modules on "cpu" as offloaded (not trained), and transformers
    # saves such a model differently.
    devices = {name: _as_torch(device) for name, device in _without_overlap(model, placement).items()}
    skipped = getattr(model, "_skip_keys_device_placement", None)
    dispatched: nn.Module = dispatch_model(model, devices, main_device=_as_torch(used[0]), skip_keys=skipped)
    return dispatched


def _without_overlap(model: nn.Module, placement: Mapping[str, Device]) -> dict[str, Device]:
    """Expand nested entries to disjoint modules; accelerate would send inputs to the outer module's device."""
    if len(placement) == 1:
        return dict(placement)
    found: dict[str, Device] = {}
    pending = list(model.named_children())
    while pending:
        name, module = pending.pop(0)
        device = _device_of(name, placement)
        if not any(other.startswith(f"{name}.") for other in placement):
            # Modules without checkpoint tensors, such as the rotary embedding, may have no device.
            found[name] = next(iter(placement.values())) if device is None else device
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            raise ConfigError(
                f"device_map splits {name}, which has weights of its own besides its children.",
                fix=f"Map {name} as a whole.",
            )
        else:
            pending += [(f"{name}.{part}", child) for part, child in module.named_children()]
    return found


def spread(model: nn.Module, plan: LayerSplit) -> dict[str, Device]:
    """Place `model` in place over this process's devices, as planned; return module name -> device."""
    placement = place(model, plan.device_map, memory_for_weights(), plan.max_memory)
    split(model, placement)
    return placement


def memory_for_weights() -> dict[Device, int]:
    """Return the visible GPUs and the bytes that weights may take on each; the host if there are none."""
    gpus: dict[Device, int] = {
        index: int(FOR_WEIGHTS * torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count())
    }
    return gpus or {"cpu": psutil.virtual_memory().total}


def map_by_split_points(model: nn.Module, split_points: Sequence[str], devices: Sequence[Device]) -> dict[str, Device]:
    """Return the device map in which the next device begins at each of the modules `split_points`."""
    names = [name for name, _ in model.named_modules()]
    unknown = [name for name in split_points if name not in names or not name]
    if unknown:
        raise ConfigError(
            f"split_points names {_some(unknown)}, which the model does not have.",
            fix=f"Use module names such as {_some([name for name in names if name])}.",
        )
    if len(set(split_points)) >= len(devices):
        raise ConfigError(
            f"{len(split_points)} split points make {len(split_points) + 1} parts, but there are {len(devices)} GPUs.",
            fix=f"Name {len(devices) - 1} modules or fewer.",
        )
    used, placement = 0, {}
    for name, module in model.named_modules():
        used += name in split_points
        if not any(True for _ in module.children()):
            placement[name] = devices[used]
    return placement


def is_split(model: nn.Module) -> bool:
    return len({parameter.device for parameter in model.parameters()}) > 1


def only_aligns_devices(layer: nn.Module) -> bool:
    """Return True if the layer's `forward` is wrapped by nothing but the hooks of `split`."""
    hook = getattr(layer, "_hf_hook", None)
    return isinstance(hook, AlignDevicesHook) and not hook.offload


def bytes_on(model: nn.Module, placement: Mapping[str, Device]) -> dict[Device, int]:
    """Return bytes of weights and buffers per device; tied weights count once."""
    found: Counter[Device] = Counter(dict.fromkeys(placement.values(), 0))
    for name, tensor in _tensors(model):
        device = _device_of(name, placement)
        if device is not None:
            found[device] += tensor.numel() * tensor.element_size()
    return dict(found)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _limits(devices: Mapping[Device, int], max_memory: MaxMemory | None) -> dict[Device, int]:
    if not devices:
        raise DeviceError("There is no device to place the model on.", fix="Run `pantheraml gpus`.")
    if max_memory is None:
        return dict(devices)
    limits: dict[Device, int] = {}
    for name, limit in max_memory.items():
        device = _device(name, devices)
        try:
            size = convert_file_size_to_int(limit)
        except ValueError as err:
            raise ConfigError(
                f"max_memory[{name!r}]={limit!r} is not a size.", fix='Write bytes, or a size like "10GiB" or "800MB".'
            ) from err
        limits[device] = min(size, devices.get(device, size))
    return limits


def _index(name: DeviceName) -> Device | None:
    """Parse a device name; None means any GPU."""
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda":
        return device.index
    if device.type == "cpu":
        return "cpu"
    raise ConfigError(
        f"{name!r} is not a valid device or device_map strategy.",
        fix=f"Use {', '.join(SPLIT_STRATEGIES)}, cuda:N, cpu, or a mapping from modules to devices.",
    )


def _as_torch(device: Device) -> torch.device:
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", device)


def _device(name: DeviceName, devices: Mapping[Device, int]) -> Device:
    device = _index(name)
    if device is None:
        device = next((one for one in devices if one != "cpu"), None)
    if device is not None and (device == "cpu" or device in devices):  # the host is always available
        return device
    raise DeviceError(
        f"{name!r} is not among the devices in use: {', '.join(map(str, devices))}.", fix="Run `pantheraml gpus`."
    )


def _by_strategy(model: nn.Module, strategy: str, room: Mapping[Device, int]) -> dict[str, Device]:
    gpus: dict[Any, int] = {device: size for device, size in room.items() if device != "cpu"}
    if len(gpus) <= 1:
        placement: dict[str, Device] = {"": next(iter(gpus), "cpu")}
        _check_room(model, placement, room)
        return placement
    whole = sorted(_undivided(model))
    lacking = 0
    for attempt in ("balanced", "sequential") if strategy == "auto" else (strategy,):
        limits = dict(gpus)
        if attempt == "balanced":
            limits = get_balanced_memory(model, limits, no_split_module_classes=whole)
        found = infer_auto_device_map(model, limits, no_split_module_classes=whole)
        if _DOES_NOT_FIT not in found.values():
            return dict(found)
        lacking = bytes_on(model, found)[_DOES_NOT_FIT]
    raise OutOfMemoryError(
        f"{_gigabytes(lacking)} of the model's {_gigabytes(_size(model))} of weights do not fit with"
        f" device_map={strategy}: {_describe(gpus)}, and the first reserves the size of one layer.",
        fix=_FIX_MEMORY if strategy == "auto" else f"Use device_map=auto. {_FIX_MEMORY}",
    )


def _undivided(model: nn.Module) -> set[str]:
    """Return the class names that must not be split: `_no_split_modules` of transformers and their subclasses."""
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return {
        type(module).__name__
        for module in model.modules()
        if any(parent.__name__ in named for parent in type(module).__mro__)
    }


def _check_map(model: nn.Module, placement: Mapping[str, Device]) -> None:
    """Raise ConfigError unless a custom map covers the model and keeps tied weights and no-split modules together."""
    unknown = sorted(set(placement) - {name for name, _ in model.named_modules()})
    if unknown:
        raise ConfigError(
            f"device_map names modules that the model does not have: {_some(unknown)}.",
            fix=f"Use module names such as {_some([name for name, _ in model.named_modules() if name])}.",
        )
    missing = [name for name in model.state_dict() if _device_of(name, placement) is None]
    if missing:
        raise ConfigError(f"device_map has no device for {_some(missing)}.", fix='Add them, or "" for the rest.')
    for group in find_tied_parameters(model):
        if len({_device_of(name, placement) for name in group}) > 1:
            raise ConfigError(
                f"device_map puts tied weights on different devices: {_some(group)}.",
                fix="Map them to the same device.",
            )
    kinds = _undivided(model)
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            inside = {_device_of(f"{name}.{part}", placement) for part, _ in _tensors(module)}
            if len(inside) > 1:
                raise ConfigError(
                    f"device_map splits {name}, which has to be on one device.", fix=f"Map {name} as a whole."
                )


def _check_room(model: nn.Module, placement: Mapping[str, Device], room: Mapping[Device, int]) -> None:
    for device, size in bytes_on(model, placement).items():
        if size > room.get(device, size):
            raise OutOfMemoryError(
                f"device {device} has {_gigabytes(room[device])} for weights, but {_gigabytes(size)} are mapped to it:"
                f" {_gigabytes(size - room[device])} too much.",
                fix=_FIX_MEMORY,
            )


def _device_of(name: str, placement: Mapping[str, Device]) -> Device | None:
    """Look up `name` by its longest mapped prefix."""
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        device = placement.get(".".join(parts[:length]))
        if device is not None:
            return device
    return None


def _size(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(model))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"


def _describe(room: Mapping[Device, int]) -> str:
    return ", ".join(f"device {device} has {_gigabytes(size)}" for device, size in room.items())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class DataParallelLoss(nn.Module):
    """A summed loss computed by `nn.DataParallel` replicas, with each batch's rows split over the devices.

    Replicas return sums, which are added, so every token counts once however unevenly rows or tokens fall on the
    devices. Gradients accumulate on the first device.
    """

    def __init__(
        self,
        loss: nn.Module,
        device_ids: Sequence[int],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`loss(*tensors)` returns the loss summed over rows, the first dimension of all `tensors`."""
        super().__init__()
        self.copies = nn.DataParallel(_OneElement(loss, autocast), device_ids=list(device_ids) or None)

    def forward(self, *tensors: Tensor) -> Tensor:
        total: Tensor = self.copies(*tensors).sum()
        return total


class _OneElement(nn.Module):
    """Return the scalar loss as a 1-element vector: DataParallel concatenates outputs, and scalars cannot be."""

    def __init__(self, loss: nn.Module, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.loss, self.autocast = loss, autocast

    def forward(self, *tensors: Tensor) -> Tensor:
        # Entered here: each replica runs in its own thread, which inherits whether autocast is on but not its dtype.
        with self.autocast():
            value: Tensor = self.loss(*tensors)
        return value.reshape(1)


def may_span_devices(device_map: DeviceMap | None) -> bool:
    """Return whether a device map may put one model on several devices."""
    if isinstance(device_map, Mapping):
        return list(device_map) != [""]
    return isinstance(device_map, str) and device_map in SPLIT_STRATEGIES


def resolve_devices(
    device_map: DeviceMap | None, max_memory: MaxMemory | None, *, multi_gpu: bool
) -> tuple[torch.device, dict[Device, int] | None]:
    """Return this process's device, and the free memory of the devices to place the model on, unless it is all on
    one.
    """
    own_device = torch.device("cuda", process_rank().local_rank) if torch.cuda.device_count() else torch.device("cpu")
    is_single_process = launched_rank() is None
    if max_memory is not None and (device_map is None or not is_single_process):
        raise ConfigError("max_memory needs a device_map and a single process.", fix="Remove it.")
    if device_map is None:
        return own_device, None
    if not is_single_process and str(device_map) != "cpu" and device_map != {"": "cpu"}:
        place_in_group(device_map, "cpu" if own_device.type == "cpu" else own_device.index)
        return own_device, None
    free_memory = memory_for_weights()
    named = named_devices(device_map, free_memory)
    if named and not may_span_devices(device_map) and max_memory is None:
        return named[0], None
    if not named and not multi_gpu:
        free_memory = dict(list(free_memory.items())[:1])
    fits_one_device = not named and len(free_memory) == 1 and max_memory is None
    return named[0] if named else own_device, None if fits_one_device else free_memory
