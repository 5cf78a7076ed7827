"""One process over several devices: a model's layers spread by a device map, or copies of it that share a batch.

A device map says which module lives where: a strategy, one device, or module -> device. `place` turns any of them into
module -> device, from sizes alone, so it can be asked about a model on the meta device; `split` then moves the layers,
and activations follow (accelerate's hooks). Nothing goes to host memory or disk unasked: what does not fit is refused.

    sequential       fills the first device, then the next
    balanced         gives every device about the same
    auto             balanced, or else sequential where uneven devices rule that out

The split saves memory, not time: one device works while the others wait. `DataParallelLoss` is the other simple mode:
every device holds the model, and gets some rows of each batch.
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

from pantheraml.base.errors import ConfigError, DeviceError, OutOfMemoryError
from pantheraml.specs.plan import LayerSplit

Device = int | Literal["cpu"]
"""A GPU's index, or the host."""
DeviceName = int | str | torch.device
DeviceMap = DeviceName | Mapping[str, DeviceName]
MaxMemory = Mapping[Any, int | str]
"""By DeviceName; a size is bytes, or such as "10GiB"."""

STRATEGIES = ("auto", "balanced", "sequential")
FOR_WEIGHTS = 0.9
"""Of a GPU's free memory; activations, gradients and optimizer states need the rest, and more with `max_memory`."""
_NOWHERE: Any = "disk"  # accelerate's word for what no device has room for
_LACKING = "Use more or larger devices, packed weights (method.kind=qlora, model.precision=fp8), or parallel.shard."


def place(
    model: nn.Module,
    device_map: DeviceMap,
    devices: Mapping[Device, int],
    max_memory: MaxMemory | None = None,
) -> dict[str, Device]:
    """Module name -> device, for all of `model`.

    `devices` are those that may be used and how many bytes weights may take on each: one device where multi-GPU is off,
    so that every strategy then means that device. `max_memory` lowers the room (`"10GiB"`), and strategies do not use
    devices that it does not name.
    """
    limits = _limits(devices, max_memory)
    if isinstance(device_map, str) and device_map in STRATEGIES:
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
    """Those that a map names, GPUs first; none for a strategy."""
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return []
    names = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
    found = {_device(name, devices) for name in names}
    return [_as_torch(device) for device in sorted(found, key=lambda d: (1, 0) if d == "cpu" else (0, d))]


def place_in_group(device_map: DeviceMap | None, device: Device) -> dict[str, DeviceName]:
    """The device map of a process that has peers: `device`, its own, for all, whatever strategy was asked for.

    A map that names other devices would put several processes on one, and is refused.
    """
    whole: dict[str, DeviceName] = {"": device}
    if device_map is None or (isinstance(device_map, str) and device_map in STRATEGIES):
        return whole
    named = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
    if {_index(name) for name in named} <= {device, None}:
        return whole
    raise ConfigError(
        f"device_map={device_map!r} names other devices than {device!r}, which this process of a group has to itself.",
        todo="Leave device_map out, or run one process.",
    )


def split(model: nn.Module, placement: Mapping[str, Device]) -> nn.Module:
    """Move `model`'s modules to their devices, in place. Parameters are new objects: make the optimizer afterwards."""
    used = list(dict.fromkeys(placement.values()))
    if len(used) == 1:
        return model.to(used[0])
    # As devices, not names: accelerate takes modules on "cpu" for offloaded ones, which are not trained, and
    # transformers takes such a model for one that must be saved in another way.
    devices = {name: _as_torch(device) for name, device in _without_overlap(model, placement).items()}
    skipped = getattr(model, "_skip_keys_device_placement", None)
    dispatched: nn.Module = dispatch_model(model, devices, main_device=_as_torch(used[0]), skip_keys=skipped)
    return dispatched


def _without_overlap(model: nn.Module, placement: Mapping[str, Device]) -> dict[str, Device]:
    """The same placement, with no module inside another one: accelerate would send inputs to the outer one's device."""
    if len(placement) == 1:
        return dict(placement)
    found: dict[str, Device] = {}
    todo = list(model.named_children())
    while todo:
        name, module = todo.pop(0)
        device = _device_of(name, placement)
        if not any(other.startswith(f"{name}.") for other in placement):
            # Without a device is what checkpoints do not hold, such as the rotary embedding.
            found[name] = next(iter(placement.values())) if device is None else device
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            raise ConfigError(
                f"device_map divides {name}, which has weights of its own beside its parts.", todo=f"Map {name} alone."
            )
        else:
            todo += [(f"{name}.{part}", child) for part, child in module.named_children()]
    return found


def spread(model: nn.Module, plan: LayerSplit) -> dict[str, Device]:
    """Place `model` as planned, over the devices of this process, in place; module name -> device."""
    placement = place(model, plan.device_map, free_room(), plan.max_memory)
    split(model, placement)
    return placement


def free_room() -> dict[Device, int]:
    """The GPUs that this process sees, and how many bytes weights may take on each; without any, the host."""
    gpus: dict[Device, int] = {
        index: int(FOR_WEIGHTS * torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count())
    }
    return gpus or {"cpu": psutil.virtual_memory().total}


def is_split(model: nn.Module) -> bool:
    return len({parameter.device for parameter in model.parameters()}) > 1


def brings_inputs_only(layer: nn.Module) -> bool:
    """Whether what was done to a layer's `forward` is no more than what `split` does."""
    hook = getattr(layer, "_hf_hook", None)
    return isinstance(hook, AlignDevicesHook) and not hook.offload


def bytes_on(model: nn.Module, placement: Mapping[str, Device]) -> dict[Device, int]:
    """What weights and buffers take on each device; tied ones once."""
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
        raise DeviceError("There is no device to place the model on.", todo="See `pantheraml gpus`.")
    if max_memory is None:
        return dict(devices)
    limits: dict[Device, int] = {}
    for name, limit in max_memory.items():
        device = _device(name, devices)
        try:
            size = convert_file_size_to_int(limit)
        except ValueError as err:
            raise ConfigError(
                f"max_memory[{name!r}]={limit!r} is not a size.", todo='Write bytes, or a size like "10GiB" or "800MB".'
            ) from err
        limits[device] = min(size, devices.get(device, size))
    return limits


def _index(name: DeviceName) -> Device | None:
    """The device that a name stands for; None: a GPU, whichever."""
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda":
        return device.index
    if device.type == "cpu":
        return "cpu"
    raise ConfigError(
        f"{name!r} is not a device or a strategy that a model can be placed by.",
        todo=f"Use {', '.join(STRATEGIES)}, cuda:N, cpu, or a mapping from modules to devices.",
    )


def _as_torch(device: Device) -> torch.device:
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", device)


def _device(name: DeviceName, devices: Mapping[Device, int]) -> Device:
    device = _index(name)
    if device is None:
        device = next((one for one in devices if one != "cpu"), None)
    if device is not None and (device == "cpu" or device in devices):  # the host is always there
        return device
    raise DeviceError(
        f"{name!r} is not among the devices to use: {', '.join(map(str, devices))}.", todo="See `pantheraml gpus`."
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
        if _NOWHERE not in found.values():
            return dict(found)
        lacking = bytes_on(model, found)[_NOWHERE]
    raise OutOfMemoryError(
        f"{_gigabytes(lacking)} of the model's {_gigabytes(_size(model))} of weights find no room with"
        f" device_map={strategy}: {_describe(gpus)}, of which the first keeps one layer's size free.",
        todo=_LACKING if strategy == "auto" else f"Use device_map=auto. {_LACKING}",
    )


def _undivided(model: nn.Module) -> set[str]:
    """Classes whose modules must be on one device as a whole: what transformers says, and classes made from those."""
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return {
        type(module).__name__
        for module in model.modules()
        if any(parent.__name__ in named for parent in type(module).__mro__)
    }


def _check_map(model: nn.Module, placement: Mapping[str, Device]) -> None:
    """ConfigError unless a map of the caller's covers the model and keeps together what belongs together."""
    unknown = sorted(set(placement) - {name for name, _ in model.named_modules()})
    if unknown:
        raise ConfigError(
            f"device_map names modules that the model does not have: {_some(unknown)}.",
            todo=f"Its parts are {_some([name for name, _ in model.named_modules() if name])}.",
        )
    missing = [name for name in model.state_dict() if _device_of(name, placement) is None]
    if missing:
        raise ConfigError(f"device_map has no device for {_some(missing)}.", todo='Add them, or "" for all the rest.')
    for group in find_tied_parameters(model):
        if len({_device_of(name, placement) for name in group}) > 1:
            raise ConfigError(
                f"device_map puts weights that are one and the same on several devices: {_some(group)}.",
                todo="Give them the same device.",
            )
    kinds = _undivided(model)
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            inside = {_device_of(f"{name}.{part}", placement) for part, _ in _tensors(module)}
            if len(inside) > 1:
                raise ConfigError(f"device_map divides {name}, which works on one device only.", todo=f"Map {name}.")


def _check_room(model: nn.Module, placement: Mapping[str, Device], room: Mapping[Device, int]) -> None:
    for device, size in bytes_on(model, placement).items():
        if size > room.get(device, size):
            raise OutOfMemoryError(
                f"{_gigabytes(size)} of weights are to go on device {device}, which has {_gigabytes(room[device])} for"
                f" them: {_gigabytes(size - room[device])} too much.",
                todo=_LACKING,
            )


def _device_of(name: str, placement: Mapping[str, Device]) -> Device | None:
    """By the longest module name that `name` begins with."""
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
    """A loss that is a sum over rows, computed by copies of a model on several devices that share each batch's rows.

    Copies return sums, and sums are added: however unevenly rows, or the tokens in them, fall on the devices, every
    token counts once. So do its gradients, which end on the first device.
    """

    def __init__(
        self,
        loss: nn.Module,
        device_ids: Sequence[int],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`loss(*tensors)` is the summed loss of rows, which are the first dimension of all `tensors`."""
        super().__init__()
        self.copies = nn.DataParallel(_OneElement(loss, autocast), device_ids=list(device_ids) or None)

    def forward(self, *tensors: Tensor) -> Tensor:
        total: Tensor = self.copies(*tensors).sum()
        return total


class _OneElement(nn.Module):
    """A scalar as a vector: results of copies are laid end to end, which scalars cannot be."""

    def __init__(self, loss: nn.Module, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.loss, self.autocast = loss, autocast

    def forward(self, *tensors: Tensor) -> Tensor:
        # Entered here: each copy runs in a thread of its own, which would know that there is autocast, but not its
        # dtype.
        with self.autocast():
            value: Tensor = self.loss(*tensors)
        return value.reshape(1)
