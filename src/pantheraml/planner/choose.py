"""choose(config, devices) -> Plan: make every automatic choice of a run, with its reason. A pure function."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.planner.choices import Choices
from pantheraml.planner.decided import Decided
from pantheraml.planner.dims import check_together, choose_dims
from pantheraml.planner.no_effect import ignored_settings
from pantheraml.planner.precision import (
    FP8_CAPABILITY,
    Capability,
    Precision,
    choose_fp8,
    choose_precision,
    parse_precision,
    why_no_fp8,
)
from pantheraml.planner.processes import LocalDevices, choose_mode, choose_world_size
from pantheraml.planner.single_process import (
    check_copies,
    check_split,
    choose_single_process,
    maps_to_cpu_only,
)
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import GPU, DeviceSpec, Plan
from pantheraml.specs.train import Checkpointing, TrainConfig, TrainSettings

# Tokens per micro-batch that keep a device busy. Beyond this, activation memory grows but the throughput of small and
# mid-sized models does not.
GPU_TOKENS_PER_MICRO_BATCH = 16_384
CPU_TOKENS_PER_MICRO_BATCH = 4_096


NOT_DECIDED = Decided()


def choose(
    config: TrainConfig, devices: DeviceSpec, place: ProcessRank | None = None, decided: Decided = NOT_DECIDED
) -> Plan:
    """Plan a run. `place`: rank of this process if a launcher started it, possibly with ranks on other nodes.

    `decided`: what a comparison of plans has decided among the settings that the configuration leaves open.
    """
    choices = Choices(decided.reasons)
    config, checkpointing = _checkpointing(decided.apply(config))
    device = _device(config, devices, choices)
    if device == "cpu" and config.parallel.device_ids is not None:
        raise ConfigError("parallel.device_ids names GPUs, but the run is on the CPU.", fix="Remove one of them.")
    gpus = _gpus(config, devices, choices) if device == "cuda" else ()
    config = choose_mode(config, len(gpus), choices)
    local = LocalDevices(len(gpus) if device == "cuda" else devices.cpu_count, device)
    world_size = choose_world_size(config, local, place, choices)
    local_world_size = local.local_world_size(world_size, place)
    single = choose_single_process(config, gpus, world_size)
    gpus = single.gpus
    if single.reason is not None:
        choices.automatic("model.device_map", str(config.model.device_map), single.reason)
    dims = _dims(config, world_size, choices)
    backend = _backend(config, device, choices)
    precision = _precision(config, device, gpus, choices)
    _trained_weights(config, precision, choices)
    frozen = _frozen_weights(config, device, gpus, dims, single.multi_device, choices)
    fp8_matmuls = _fp8_matmuls(config, gpus, choices)
    if single.copies:
        check_copies(config, frozen)
    check_split(config, single)
    fused = _fused(config, device, gpus, _Numerics(precision, frozen, fp8_matmuls, dims, single.multi_device), choices)
    compiled = _compile(config, device, world_size, fused, single.multi_device, choices)
    graph = _cuda_graph(config, device, world_size, fused or compiled, single.multi_device, choices)
    micro_batch = _micro_batch(config, dims, device, len(gpus) if single.copies else 1, choices)
    threads = max(1, devices.cpu_count // local_world_size)
    shared = ", oversubscribed" if device == "cpu" and local_world_size > devices.cpu_count else ""
    choices.automatic(
        "threads_per_process", threads, f"{devices.cpu_count} cores for {local_world_size} process(es){shared}"
    )
    if checkpointing.reason is None:
        choices.configured("train.activation_checkpointing", checkpointing.mode)
    else:
        choices.automatic("train.activation_checkpointing", checkpointing.mode, checkpointing.reason)
    return Plan(
        device=device,
        device_ids=tuple(gpu.index for gpu in (gpus if single.copies or single.split else gpus[:local_world_size])),
        world_size=world_size,
        dims=dims,
        backend=backend,
        precision=precision,
        frozen_weights=frozen,
        fp8_matmuls=fp8_matmuls,
        fused=fused,
        cuda_graph=graph,
        compile=compiled,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=micro_batch,
        activation_checkpointing=checkpointing.mode,
        threads_per_process=threads,
        predicted_memory_bytes=None,
        predicted_seconds=None,
        choices=tuple(choices.made),
        copies=single.copies,
        split=single.split,
        memory_fraction=config.parallel.memory_fraction if device == "cuda" else None,
        mig_uuid=gpus[0].mig_uuid if gpus else None,
        warnings=(*local.warnings(local_world_size), *ignored_settings(config, dims, device=device)),
    )


class _Checkpointing(NamedTuple):
    mode: Checkpointing
    reason: str | None
    """None: as configured."""


def _checkpointing(config: TrainConfig) -> tuple[TrainConfig, _Checkpointing]:
    """Resolve `auto`, so that the choices after it read what the run does."""
    mode = config.train.activation_checkpointing
    if mode != "auto":
        return config, _Checkpointing(mode, None)
    train = config.train.model_copy(update={"activation_checkpointing": "none"})
    reason = "recomputing costs time, and memory is not predicted to be short"
    return config.model_copy(update={"train": train}), _Checkpointing("none", reason)


def _device(config: TrainConfig, devices: DeviceSpec, choices: Choices) -> Literal["cpu", "cuda"]:
    if config.device == "cpu":
        choices.configured("device", "cpu")
        return "cpu"
    if maps_to_cpu_only(config.model):
        if config.device == "cuda":
            raise ConfigError("device is cuda, but model.device_map names only the CPU.", fix="Remove one of them.")
        choices.automatic("device", "cpu", "model.device_map names only the CPU")
        return "cpu"
    if config.device == "cuda":
        if not devices.gpus:
            raise DeviceError(
                f"device is cuda, but there is no usable GPU ({devices.note or 'none found'}).",
                fix="Use --device cpu, or check the driver with `nvidia-smi`.",
            )
        choices.configured("device", "cuda")
        return "cuda"
    if devices.gpus:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in devices.gpus))
        choices.automatic("device", "cuda", f"{len(devices.gpus)} GPU(s) found: {names}")
        return "cuda"
    choices.automatic("device", "cpu", devices.note or "no GPU found")
    return "cpu"


def _gpus(config: TrainConfig, devices: DeviceSpec, choices: Choices) -> tuple[GPU, ...]:
    device_ids = config.parallel.device_ids
    if device_ids is None:
        if devices.selection is not None:
            choices.automatic("parallel.device_ids", [gpu.index for gpu in devices.gpus], devices.selection)
        return devices.gpus
    known = {gpu.index: gpu for gpu in devices.gpus}
    missing = [index for index in device_ids if index not in known]
    if missing or len(set(device_ids)) != len(device_ids) or not device_ids:
        raise DeviceError(
            f"parallel.device_ids={device_ids} must list usable GPUs, each once; available are {sorted(known)}.",
            fix="Correct parallel.device_ids; `pantheraml gpus` lists the GPUs.",
        )
    choices.configured("parallel.device_ids", device_ids)
    return tuple(known[index] for index in device_ids)


def _dims(config: TrainConfig, world_size: int, choices: Choices) -> ParallelDims:
    dims, reason = choose_dims(config.parallel, world_size)
    check_together(config, dims)
    if dims.data > config.train.global_batch_size:
        raise ConfigError(
            f"A global batch of {config.train.global_batch_size} sequence(s) is too small for {dims.data} processes.",
            fix="Raise train.global_batch_size or lower --nproc.",
        )
    if world_size > 1:
        choices.automatic("parallel", str(dims), reason)
    return dims


def _backend(config: TrainConfig, device: str, choices: Choices) -> Literal["nccl", "gloo"]:
    if device == "cpu":
        choices.automatic("parallel.backend", "gloo", "CPU processes communicate through gloo")
        return "gloo"
    if config.parallel.backend == "nccl":  # the default: whether somebody asked for it makes no difference
        choices.automatic("parallel.backend", "nccl", "GPU processes communicate through NCCL")
    else:
        choices.configured("parallel.backend", config.parallel.backend)
    return config.parallel.backend


def _precision(
    config: TrainConfig, device: Literal["cpu", "cuda"], gpus: tuple[GPU, ...], choices: Choices
) -> Precision:
    requested = config.model.precision
    name = "model.precision" if requested == "auto" else "compute_precision"
    if requested != "auto":
        choices.configured("model.precision", requested)
        if requested == "fp8":
            return "bf16"
    explicit = None if requested in ("int8", "nf4") else parse_precision(requested, setting="model.precision")
    if explicit is None and device == "cpu" and config.train.weights == "bf16":
        choices.automatic(name, "bf16", "train.weights is bf16")
        return "bf16"
    precision, reason = choose_precision(explicit, device, _capabilities(gpus))
    if explicit is None:
        choices.automatic(name, precision, reason)
    return precision


def _capabilities(gpus: tuple[GPU, ...]) -> list[Capability | None]:
    return [gpu.compute_capability for gpu in gpus]


def _trained_weights(config: TrainConfig, precision: Precision, choices: Choices) -> None:
    weights = config.train.weights
    if weights == "bf16" and precision != "bf16":
        raise DeviceError(
            f"train.weights=bf16 needs bf16 compute, but the run would compute in {precision}.",
            fix="Use train.weights=fp32, or GPUs of compute capability 8.0 or newer.",
        )
    if config.method.kind == "full":
        choices.configured("train.weights", weights)


def _frozen_weights(
    config: TrainConfig,
    device: str,
    gpus: tuple[GPU, ...],
    dims: ParallelDims,
    multi_device: str | None,
    choices: Choices,
) -> Literal["fp8", "int8", "nf4"] | None:
    requested = config.model.precision
    if config.method.kind == "qlora":
        choices.automatic("frozen_weights", "nf4", "method.kind is qlora")
        return "nf4"
    if requested in ("int8", "nf4"):
        choices.automatic("frozen_weights", requested, f"model.precision is {requested}")
        return requested
    if requested == "auto" and device == "cuda" and config.method.kind != "full":
        fp8, reason = choose_fp8(_capabilities(gpus), unfit=_why_not_fp8(config, dims, multi_device))
        choices.automatic("frozen_weights", "fp8" if fp8 else "not quantized", reason)
        return "fp8" if fp8 else None
    if requested != "fp8" or config.method.kind == "full":
        return None
    _check_fp8(gpus)
    choices.automatic("frozen_weights", "fp8", "model.precision is fp8")
    return "fp8"


def _check_fp8(gpus: tuple[GPU, ...]) -> None:
    problem = why_no_fp8(_capabilities(gpus))
    if problem is not None:
        raise DeviceError(f"model.precision=fp8 is not possible here: {problem}.", fix="Use model.precision=bf16.")


def _fp8_matmuls(config: TrainConfig, gpus: tuple[GPU, ...], choices: Choices) -> bool:
    """Choose fp8 matmuls for a full fine-tune."""
    if config.method.kind != "full" or config.model.precision != "fp8":
        return False
    _check_fp8(gpus)
    which = "forward and input gradients, plus weight gradients when fused"
    choices.automatic("fp8_matmuls", True, f"model.precision is fp8: {which}")
    return True


def _why_not_fp8(config: TrainConfig, dims: ParallelDims, multi_device: str | None) -> str | None:
    """Why fp8 was not measured to be faster with this configuration; None: it was."""
    if config.method.kind == "dora" or config.method.dropout > 0 or config.train.fused == "off":
        return "fp8 is faster only with fused layers, and these are not fused"
    if dims.world_size > dims.replicate:
        return f"fp8 is faster only with fused layers, and the model is sharded ({dims})"
    return multi_device


class _Numerics(NamedTuple):
    """Precision, quantization and parallelism chosen so far."""

    precision: Precision
    frozen: str | None
    fp8_matmuls: bool
    dims: ParallelDims
    multi_device: str | None
    """Why the model is not on one device; None: it is."""


def _fused(config: TrainConfig, device: str, gpus: tuple[GPU, ...], numerics: _Numerics, choices: Choices) -> bool:
    requested, full = config.train.fused, config.method.kind == "full"
    offload = config.train.activation_checkpointing == "offload" and config.train.compile != "on"
    unsupported = _why_not_fused(config, gpus, numerics) if device == "cuda" else None
    if numerics.dims.world_size > numerics.dims.replicate:
        unsupported = f"fused layers need unsharded weights, and the model is sharded ({numerics.dims})"
    elif numerics.multi_device is not None:
        unsupported = numerics.multi_device
    if requested != "auto":
        if requested == "on" and unsupported is not None:
            raise DeviceError(f"train.fused=on is not possible here: {unsupported}.", fix="Remove train.fused.")
        choices.configured("train.fused", requested)
        return requested == "on"
    reason = unsupported
    if device == "cpu":
        reason = "fused layers are made for GPUs"
    elif config.method.dropout > 0:
        reason = "fused layers do not support adapter dropout"
    elif config.method.kind == "dora":
        reason = "fused layers do not support method.kind=dora"
    elif full and reason is None and not numerics.fp8_matmuls and not offload:
        reason = _why_not_fused_bf16(config.train)
    if reason is not None:
        choices.automatic("train.fused", False, reason)
        return False
    what = "weights are frozen: base and adapter share one matmul, with few passes over memory"
    if full:
        what = "layers with the same input share one matmul, and norms and activations write its operands directly"
        what += (
            "; with recompute, gradients reuse the memory of activations"
            if offload and not numerics.fp8_matmuls
            else ""
        )
    nf4 = "; fp8 matmuls read nf4 weights directly" if numerics.frozen == "nf4" else ""
    choices.automatic("train.fused", True, f"{what}{nf4}")
    return True


def _why_not_fused_bf16(train: TrainSettings) -> str:
    """Why a full fine-tune with bf16 matmuls is not fused."""
    if train.activation_checkpointing == "none" or train.compile == "on":
        return "compiled layers were faster with bf16 matmuls"
    return f"not measured for bf16 matmuls with activation_checkpointing={train.activation_checkpointing}"


def _why_not_fused(config: TrainConfig, gpus: tuple[GPU, ...], numerics: _Numerics) -> str | None:
    """Why these GPUs cannot run fused layers; None: they can."""
    if numerics.precision != "bf16":
        return f"fused layers compute in bf16, and the compute precision is {numerics.precision}"
    if config.method.kind == "full" and config.train.weights != "bf16":
        return f"fused layers train bf16 weights, and train.weights is {config.train.weights}"
    if numerics.frozen != "nf4":
        return None
    if any(gpu.compute_capability is None or gpu.compute_capability < FP8_CAPABILITY for gpu in gpus):
        return "fused layers use fp8 matmuls for nf4 weights, which need compute capability 9.0 or newer"
    return None


def _cuda_graph(
    config: TrainConfig, device: str, world_size: int, measured: bool, multi_device: str | None, choices: Choices
) -> bool:
    requested = config.train.cuda_graph
    unsupported = None
    if device == "cpu":
        unsupported = "there is no GPU"
    elif world_size > 1:
        unsupported = "steps of several processes contain collectives"
    elif multi_device is not None:
        unsupported = multi_device
    elif config.train.activation_checkpointing == "offload":
        unsupported = "activations are offloaded to host memory"
    elif config.model.precision == "fp16":
        unsupported = "the fp16 loss scale changes from step to step"
    if requested == "on" and unsupported is not None:
        raise ConfigError(f"train.cuda_graph=on is not possible: {unsupported}.", fix="Remove train.cuda_graph.")
    if requested != "auto":
        choices.configured("train.cuda_graph", requested)
        return requested == "on"
    reason = unsupported
    if reason is None and not config.data.packing:
        reason = "without packing, batch shapes vary"
    if reason is None and not measured:
        reason = "measured only with fused or compiled layers so far"
    if reason is not None:
        choices.automatic("train.cuda_graph", False, reason)
        return False
    choices.automatic("train.cuda_graph", True, "packed batches have one shape: a step is one graph launch")
    return True


def _compile(
    config: TrainConfig, device: str, world_size: int, fused: bool, multi_device: str | None, choices: Choices
) -> bool:
    requested = config.train.compile
    if requested != "auto":
        choices.configured("train.compile", requested)
        return requested == "on"
    reason = None
    quantized = config.model.precision in ("int8", "nf4")
    if device == "cpu":
        reason = "compiling pays off only on GPUs"
    elif multi_device is not None:
        reason = multi_device
    elif world_size > 1 or config.method.kind in ("dora", "qlora") or config.method.dropout > 0 or quantized:
        reason = "measured only for unquantized or fp8 weights, without dropout, in one process so far"
    elif config.train.activation_checkpointing != "none":
        reason = "measured only without activation checkpointing so far"
    elif not config.data.packing:
        reason = "without packing, batch shapes vary and each one recompiles"
    if reason is not None:
        choices.automatic("train.compile", False, reason)
        return False
    which = "fused layers are not compiled; others compile once" if fused else "layers compile once"
    choices.automatic("train.compile", True, f"{which}: packed batches have one shape")
    return True


def _micro_batch(config: TrainConfig, dims: ParallelDims, device: str, copies: int, choices: Choices) -> int:
    """Micro-batch size of a process, over its `copies` of the model; the configured value is per copy."""
    parts = dims.data * copies
    share = math.ceil(config.train.global_batch_size / parts)
    requested = config.train.micro_batch_size
    if requested != "auto":
        if requested > share:
            raise ConfigError(
                f"train.micro_batch_size={requested} is more than one {'GPU' if copies > 1 else 'process'} gets of the"
                f" global batch ({config.train.global_batch_size} over {parts} = {share}).",
                fix=f"Set train.micro_batch_size to {share} or less, or to auto.",
            )
        choices.configured("train.micro_batch_size", requested)
        return requested * copies
    budget = GPU_TOKENS_PER_MICRO_BATCH if device == "cuda" else CPU_TOKENS_PER_MICRO_BATCH
    largest = max(1, min(share, budget // config.data.seq_len))
    # The pipeline bubble is (stages - 1) / (micro-batches + stages - 1): below a fifth with 4 micro-batches per stage.
    fewest = 4 * dims.pipeline if dims.pipeline > 1 else 1
    passes = min(share, max(math.ceil(share / largest), fewest))
    size = math.ceil(share / passes)
    choices.automatic(
        "train.micro_batch_size",
        size,
        f"{share} sequence(s) of {config.data.seq_len} tokens per {'GPU' if copies > 1 else 'process'}, at most"
        f" {budget} tokens per micro-batch: {passes} micro-batch(es) of {size}",
    )
    return size * copies
