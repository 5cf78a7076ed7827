"""choose(config, devices) -> Plan: every automatic choice of a run, with its reason. A pure function."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.planner.choices import Choices
from pantheraml.planner.dims import check_together, choose_dims
from pantheraml.planner.layouts import choose_layouts
from pantheraml.planner.no_effect import without_effect
from pantheraml.planner.one_process import (
    check_copies,
    check_split,
    choose_one_process,
    names_cpu_alone,
)
from pantheraml.planner.processes import Room, choose_mode, choose_world_size
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import GPU, DeviceSpec, Plan
from pantheraml.specs.train import TrainConfig, TrainSettings

# Tokens per forward pass that keep a device busy without filling its memory with activations; beyond this, throughput
# on small and mid-sized models no longer rises while memory does.
GPU_TOKENS_PER_MICRO_BATCH = 16_384
CPU_TOKENS_PER_MICRO_BATCH = 4_096

FP8_CAPABILITY = (9, 0)
"""Row-wise scaled fp8 products were measured on Hopper; what Ada does with them is not known yet."""

Precision = Literal["fp32", "bf16", "fp16"]


def choose(config: TrainConfig, devices: DeviceSpec, place: ProcessRank | None = None) -> Plan:
    """`place` is that of this process where a launcher started it, and others on other machines perhaps."""
    choices = Choices()
    device = _device(config, devices, choices)
    if device == "cpu" and config.parallel.device_ids is not None:
        raise ConfigError("parallel.device_ids names GPUs, but the run is on the CPU.", todo="Drop one of them.")
    gpus = _gpus(config, devices, choices) if device == "cuda" else ()
    config = choose_mode(config, len(gpus), choices)
    room = Room(len(gpus) if device == "cuda" else devices.cpu_count, device)
    world_size = choose_world_size(config, room, place, choices)
    here = room.processes_here(world_size, place)
    one = choose_one_process(config, gpus, world_size)
    gpus = one.gpus
    if one.reason is not None:
        choices.automatic("model.device_map", str(config.model.device_map), one.reason)
    dims = _dims(config, world_size, choices)
    backend = _backend(config, device, choices)
    precision = _precision(config, device, gpus, choices)
    _trained_weights(config, precision, choices)
    frozen = _frozen_weights(config, device, gpus, dims, one.several, choices)
    products = _fp8_products(config, device, gpus, choices)
    if one.copies:
        check_copies(config, frozen)
    check_split(config, one)
    fused = _fused(config, device, gpus, _Work(precision, frozen, products, dims, one.several), choices)
    layouts = choose_layouts(config, frozen, fused, choices)
    compiled = _compile(config, device, world_size, fused, one.several, choices)
    graph = _cuda_graph(config, device, world_size, fused or compiled, one.several, choices)
    micro_batch = _micro_batch(config, dims, device, len(gpus) if one.copies else 1, choices)
    threads = max(1, devices.cpu_count // here)
    turns = ", which take turns" if device == "cpu" and here > devices.cpu_count else ""
    choices.automatic("threads_per_process", threads, f"{devices.cpu_count} cores over {here} process(es){turns}")
    checkpointing = config.train.activation_checkpointing
    choices.asked("train.activation_checkpointing", checkpointing)
    return Plan(
        device=device,
        device_ids=tuple(gpu.index for gpu in (gpus if one.copies or one.split else gpus[:here])),
        world_size=world_size,
        dims=dims,
        backend=backend,
        precision=precision,
        frozen_weights=frozen,
        fp8_layouts=layouts,
        fp8_products=products,
        fused=fused,
        cuda_graph=graph,
        compile=compiled,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=micro_batch,
        activation_checkpointing=checkpointing,
        threads_per_process=threads,
        predicted_memory_bytes=None,
        predicted_seconds=None,
        choices=tuple(choices.made),
        copies=one.copies,
        split=one.split,
        warnings=(*room.warnings(here), *without_effect(config, dims, frozen_fp8=frozen == "fp8")),
    )


def _device(config: TrainConfig, devices: DeviceSpec, choices: Choices) -> Literal["cpu", "cuda"]:
    if config.device == "cpu":
        choices.asked("device", "cpu")
        return "cpu"
    if names_cpu_alone(config.model):
        if config.device == "cuda":
            raise ConfigError("device is cuda, but model.device_map names the CPU alone.", todo="Drop one of them.")
        choices.automatic("device", "cpu", "model.device_map names it alone")
        return "cpu"
    if config.device == "cuda":
        if not devices.gpus:
            raise DeviceError(
                f"device=cuda was asked for, but there is no usable GPU ({devices.note or 'none found'}).",
                todo="Use --device cpu, or check the driver with `nvidia-smi`.",
            )
        choices.asked("device", "cuda")
        return "cuda"
    if devices.gpus:
        choices.automatic("device", "cuda", f"{len(devices.gpus)} GPU(s) found: {devices.gpus[0].name}")
        return "cuda"
    choices.automatic("device", "cpu", devices.note or "no GPU found")
    return "cpu"


def _gpus(config: TrainConfig, devices: DeviceSpec, choices: Choices) -> tuple[GPU, ...]:
    wanted = config.parallel.device_ids
    if wanted is None:
        return devices.gpus
    known = {gpu.index: gpu for gpu in devices.gpus}
    missing = [index for index in wanted if index not in known]
    if missing or len(set(wanted)) != len(wanted) or not wanted:
        raise DeviceError(
            f"parallel.device_ids={wanted} does not name usable GPUs once each; there are {sorted(known)}.",
            todo="Correct parallel.device_ids; `pantheraml gpus` lists them.",
        )
    choices.asked("parallel.device_ids", wanted)
    return tuple(known[index] for index in wanted)


def _dims(config: TrainConfig, world_size: int, choices: Choices) -> ParallelDims:
    dims, reason = choose_dims(config.parallel, world_size)
    check_together(config, dims)
    if dims.data > config.train.global_batch_size:
        raise ConfigError(
            f"{dims.data} processes cannot share a global batch of {config.train.global_batch_size} sequence(s).",
            todo="Raise train.global_batch_size or lower --nproc.",
        )
    if world_size > 1:
        choices.automatic("parallel", str(dims), reason)
    return dims


def _backend(config: TrainConfig, device: str, choices: Choices) -> Literal["nccl", "gloo"]:
    if device == "cpu":
        choices.automatic("parallel.backend", "gloo", "processes on CPUs talk through gloo")
        return "gloo"
    choices.asked("parallel.backend", config.parallel.backend)
    return config.parallel.backend


def _precision(config: TrainConfig, device: str, gpus: tuple[GPU, ...], choices: Choices) -> Precision:
    asked = config.model.precision
    if asked != "auto":
        if asked == "fp16" and device == "cpu":
            raise DeviceError(
                "model.precision=fp16 needs a GPU: CPUs have no fast fp16 arithmetic.",
                todo="Use --set model.precision=fp32 or bf16.",
            )
        choices.asked("model.precision", asked)
        if asked != "int8" and asked != "nf4":
            return "bf16" if asked == "fp8" else asked
    name = "model.precision" if asked == "auto" else "arithmetic"
    if device == "cpu" and config.train.weights == "bf16":
        choices.automatic(name, "bf16", "train.weights is bf16")
        return "bf16"
    if device == "cpu":
        choices.automatic(name, "fp32", "CPU arithmetic is exact in fp32 and rarely faster in bf16")
        return "fp32"
    capabilities = [gpu.compute_capability for gpu in gpus]
    if any(capability is None for capability in capabilities):
        choices.automatic(name, "fp32", "the driver does not tell the compute capability")
        return "fp32"
    weakest = min(capability for capability in capabilities if capability is not None)
    version = f"compute capability {weakest[0]}.{weakest[1]}"
    if weakest >= (8, 0):
        choices.automatic(name, "bf16", f"{version} has bf16 tensor cores")
        return "bf16"
    choices.automatic(name, "fp16", f"{version} has no bf16; fp16 runs with loss scaling")
    return "fp16"


def _trained_weights(config: TrainConfig, precision: Precision, choices: Choices) -> None:
    weights = config.train.weights
    if weights == "bf16" and precision != "bf16":
        raise DeviceError(
            f"train.weights=bf16 needs bf16 arithmetic, but the run would compute in {precision}.",
            todo="Use train.weights=fp32, or GPUs of compute capability 8.0 or newer.",
        )
    if config.method.kind == "full":
        choices.asked("train.weights", weights)


def _frozen_weights(
    config: TrainConfig,
    device: str,
    gpus: tuple[GPU, ...],
    dims: ParallelDims,
    several: str | None,
    choices: Choices,
) -> Literal["fp8", "int8", "nf4"] | None:
    asked = config.model.precision
    if config.method.kind == "qlora":
        choices.automatic("frozen_weights", "nf4", "method.kind is qlora")
        return "nf4"
    if asked in ("int8", "nf4"):
        choices.automatic("frozen_weights", asked, f"model.precision is {asked}")
        return asked
    weak = _too_old_for_fp8(gpus)
    if asked == "auto" and device == "cuda" and config.method.kind != "full":
        why_not = _why_not_fp8(config, weak, dims, several)
        if why_not is None:
            reason = "fp8 tensor cores are the fastest, and the loss stays bf16's (docs/benchmarks.md, accuracy)"
            choices.automatic("frozen_weights", "fp8", reason)
            return "fp8"
        choices.automatic("frozen_weights", "as computed with", why_not)
    if asked != "fp8" or config.method.kind == "full":
        return None
    _check_fp8(device, weak)
    choices.automatic("frozen_weights", "fp8", "model.precision is fp8")
    return "fp8"


def _check_fp8(device: str, weak: list[str]) -> None:
    if device == "cuda" and weak:
        raise DeviceError(
            f"model.precision=fp8 needs GPUs of compute capability 9.0 or newer, which {weak[0]} is not known to be.",
            todo="Use model.precision=bf16.",
        )


def _fp8_products(config: TrainConfig, device: str, gpus: tuple[GPU, ...], choices: Choices) -> bool:
    """Of a full fine-tune."""
    if config.method.kind != "full" or config.model.precision != "fp8":
        return False
    _check_fp8(device, _too_old_for_fp8(gpus))
    which = "forward products and those for inputs' gradients; for weights' as well where layers are fused"
    choices.automatic("fp8_products", True, f"model.precision is fp8: {which}")
    return True


def _too_old_for_fp8(gpus: tuple[GPU, ...]) -> list[str]:
    return [gpu.name for gpu in gpus if gpu.compute_capability is None or gpu.compute_capability < FP8_CAPABILITY]


def _why_not_fp8(config: TrainConfig, weak: list[str], dims: ParallelDims, several: str | None) -> str | None:
    """Why weights that nobody asked to have in fp8 are not; None: they may be. What is chosen is what was measured."""
    if weak:
        return f"fp8 needs compute capability 9.0 or newer, which {weak[0]} is not known to have"
    if config.method.kind == "dora" or config.method.dropout > 0 or config.train.fused == "off":
        return "fp8 gains where layers are fused, and these are not"
    if dims.world_size > dims.replicate:
        return f"fp8 gains where layers are fused, and the model is divided ({dims})"
    return several


class _Work(NamedTuple):
    """What was decided about the arithmetic, and how the work is divided."""

    precision: Precision
    frozen: str | None
    fp8_products: bool
    dims: ParallelDims
    several: str | None
    """Why a process has no one model; None: it has."""


def _fused(config: TrainConfig, device: str, gpus: tuple[GPU, ...], work: _Work, choices: Choices) -> bool:
    asked, full = config.train.fused, config.method.kind == "full"
    again = config.train.activation_checkpointing == "offload" and config.train.compile != "on"
    lacking = _why_not_fused(config, gpus, work) if device == "cuda" else None
    if work.dims.world_size > work.dims.replicate:
        lacking = f"fused layers hold their weights whole, and the model is divided ({work.dims})"
    elif work.several is not None:
        lacking = work.several
    if asked != "auto":
        if asked == "on" and lacking is not None:
            raise DeviceError(f"train.fused=on is not possible here: {lacking}.", todo="Leave it out.")
        choices.asked("train.fused", asked)
        return asked == "on"
    reason = lacking
    if device == "cpu":
        reason = "the fused layers are made for GPUs"
    elif config.method.dropout > 0:
        reason = "the fused layers do not have dropout on the adapter"
    elif config.method.kind == "dora":
        reason = "the fused layers do not have method.kind=dora"
    elif full and reason is None and not work.fp8_products and not again:
        reason = _why_plain(config.train)
    if reason is not None:
        choices.automatic("train.fused", False, reason)
        return False
    what = "weights are frozen: base and adapter are one product, few passes over memory"
    if full:
        what = "layers with one input are one product, and norms and activations write its rows as it reads them"
        what += "; computed again, gradients take the place of activations" if again and not work.fp8_products else ""
    nf4 = ", in fp8 straight from nf4" if work.frozen == "nf4" else ""
    choices.automatic("train.fused", True, f"{what}{nf4}")
    return True


def _why_plain(train: TrainSettings) -> str:
    """Of a full fine-tune with products in bf16."""
    if train.activation_checkpointing == "none" or train.compile == "on":
        return "with products in bf16 compiled layers were faster"
    return f"with products in bf16 not measured with activation_checkpointing={train.activation_checkpointing}"


def _why_not_fused(config: TrainConfig, gpus: tuple[GPU, ...], work: _Work) -> str | None:
    """Why layers must stay unfused on these GPUs; None: they need not."""
    if work.precision != "bf16":
        return f"fused layers compute in bf16, and the arithmetic is {work.precision}"
    if config.method.kind == "full" and config.train.weights != "bf16":
        return f"fused layers train weights in bf16, and train.weights is {config.train.weights}"
    if work.frozen != "nf4":
        return None
    if any(gpu.compute_capability is None or gpu.compute_capability < FP8_CAPABILITY for gpu in gpus):
        return "fused layers multiply nf4 weights in fp8, which needs GPUs of compute capability 9.0 or newer"
    return None


def _cuda_graph(
    config: TrainConfig, device: str, world_size: int, tried: bool, several: str | None, choices: Choices
) -> bool:
    asked = config.train.cuda_graph
    why_never = None
    if device == "cpu":
        why_never = "there is no GPU"
    elif world_size > 1:
        why_never = "several processes meet in the middle of a step"
    elif several is not None:
        why_never = several
    elif config.train.activation_checkpointing == "offload":
        why_never = "activations go through host memory"
    elif config.model.precision == "fp16":
        why_never = "the loss scale of fp16 changes from step to step"
    if asked == "on" and why_never is not None:
        raise ConfigError(f"train.cuda_graph=on is not possible: {why_never}.", todo="Leave it out.")
    if asked != "auto":
        choices.asked("train.cuda_graph", asked)
        return asked == "on"
    reason = why_never
    if reason is None and not config.data.packing:
        reason = "without packing every batch has another shape"
    if reason is None and not tried:
        reason = "measured so far only with fused or compiled layers"
    if reason is not None:
        choices.automatic("train.cuda_graph", False, reason)
        return False
    choices.automatic("train.cuda_graph", True, "packed batches have one shape: the CPU launches a step as a whole")
    return True


def _compile(
    config: TrainConfig, device: str, world_size: int, fused: bool, several: str | None, choices: Choices
) -> bool:
    asked = config.train.compile
    if asked != "auto":
        choices.asked("train.compile", asked)
        return asked == "on"
    reason = None
    packed = config.model.precision in ("int8", "nf4")
    if device == "cpu":
        reason = "compiling pays on GPUs"
    elif several is not None:
        reason = several
    elif world_size > 1 or config.method.kind in ("dora", "qlora") or config.method.dropout > 0 or packed:
        reason = "measured so far only for plain weights or fp8, without dropout, in one process"
    elif config.train.activation_checkpointing != "none":
        reason = "measured so far only without activation checkpointing"
    elif not config.data.packing:
        reason = "without packing every batch has another shape, and compiles anew"
    if reason is not None:
        choices.automatic("train.compile", False, reason)
        return False
    which = "fused layers need no compiler; others are compiled once, as" if fused else "compiled once for all layers:"
    choices.automatic("train.compile", True, f"{which} packed batches have one shape")
    return True


def _micro_batch(config: TrainConfig, dims: ParallelDims, device: str, copies: int, choices: Choices) -> int:
    """For a process, all of whose `copies` of the model share a forward pass; what is configured is for one."""
    sharing = dims.data * copies
    share = math.ceil(config.train.global_batch_size / sharing)
    asked = config.train.micro_batch_size
    if asked != "auto":
        if asked > share:
            raise ConfigError(
                f"train.micro_batch_size={asked} is more than one {'GPU' if copies > 1 else 'process'} gets of the"
                f" global batch ({config.train.global_batch_size} over {sharing} = {share}).",
                todo=f"Set train.micro_batch_size to {share} or less, or to auto.",
            )
        choices.asked("train.micro_batch_size", asked)
        return asked * copies
    budget = GPU_TOKENS_PER_MICRO_BATCH if device == "cuda" else CPU_TOKENS_PER_MICRO_BATCH
    largest = max(1, min(share, budget // config.data.seq_len))
    # A pipeline is idle for (stages - 1) of (passes + stages - 1) turns; with four passes per stage, for about a fifth.
    wanted = 4 * dims.pipeline if dims.pipeline > 1 else 1
    passes = min(share, max(math.ceil(share / largest), wanted))
    size = math.ceil(share / passes)
    choices.automatic(
        "train.micro_batch_size",
        size,
        f"{share} sequence(s) of {config.data.seq_len} tokens per {'GPU' if copies > 1 else 'process'}, at most"
        f" {budget} tokens a pass: {passes} pass(es) of {size}",
    )
    return size * copies
