"""Predict the time of a training step, by part, from a model's widths, a setting and measured rates.

Matmuls and attention are counted in floating-point operations. All else of a layer moves memory: its kernels are
counted in bytes per token. The counts follow the kernels; they agree with the times of single kernels on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pantheraml.planner.layer_sizes import LayerSizes, layer_sizes
from pantheraml.planner.links import Links
from pantheraml.planner.memory.weights import shard_degree
from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.rates import MachineRates
from pantheraml.planner.setting import Setting

PARTS = ("matmul", "attention", "memory", "communication", "bubble", "launch", "optimizer")
LIMITS = {
    "matmul": "compute",
    "attention": "compute",
    "memory": "bandwidth",
    "optimizer": "bandwidth",
    "communication": "communication",
    "bubble": "bubble",
    "launch": "launch",
}
"""Part -> what limits a step in which it is the largest."""

LAUNCHES_PER_LAYER, BF16_LAUNCHES_PER_LAYER = 100, 83
"""Kernels of a fused decoder layer's forward and backward, with fp8 matmuls and without. Only the product with
`launch_us` is measured. Unfused layers were not, and have more kernels: they are taken to be no quicker than fp8's."""
GAP_SECONDS = 48 * 1.5e-6
"""A layer's gaps between kernels on the GPU: a profile of Qwen3-4B's captured step has 48 kernels per layer, and 2.7 ms
of 184 ms in no kernel."""
FORWARD_SHARE = 1 / 3.5
"""Share of the forward in attention's matmuls: two, and five in the backward."""
LOGIT_BYTES = 12
"""Moved per logit: written and read in forward and backward, by chunks."""
OPTIMIZER_BYTES = {("adamw", "fp32"): 36, ("adamw", "bf16"): 26, ("adamw_bf16", "fp32"): 28, ("adamw_bf16", "bf16"): 18}
"""Moved per trained parameter: weight, gradient, two states, the gradient's norm and zeros. By optimizer and dtype."""
EIGHT_BIT_BYTES = 33
"""8-bit states are read, expanded and rounded again; measured as that much more than bf16 states."""
LORA_COLUMNS = 128
"""Columns that adapters add to a fused product, forward; its tiles are that wide."""
ATTENTION_START = {64: 480, 128: 1310}
"""By size of a head: the keys in whose time a query could be compared with, besides its own keys. What a block of
queries costs before and after its loop over keys, so that long sequences are faster per operation: measured at 2,048
and 32,768 tokens."""
RATED_LENGTH = 2048
"""Sequence of `attention_tflops`."""
EAGER_SHARE = 0.62
"""Share of a copy's rate that kernels of unfused, uncompiled layers reach: they broadcast, convert and are short."""
SUSTAINED = 0.95
"""Share of the rates of single kernels that a whole step reaches: at its power limit, a GPU lowers its clock. From two
rows of docs/planner.md; all others test it."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part."""

    parts: dict[str, float]
    sources: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limited_by(self) -> str:
        totals: dict[str, float] = {}
        for part, seconds in self.parts.items():
            totals[LIMITS[part]] = totals.get(LIMITS[part], 0.0) + seconds
        return max(totals, key=lambda name: totals[name])


@dataclass(frozen=True)
class TimeInputs:
    """Inputs of the predicted step time, besides the setting."""

    sizes: LayerSizes
    parameters: int
    trained: int
    """Parameters."""
    rates: MachineRates
    links: Links | None = None
    bound: bool = False
    """The rates are peaks that kernels are taken to reach, without gaps between them."""

    @classmethod
    def of(
        cls, shapes: ModelShapes, setting: Setting, rates: MachineRates, links: Links | None = None
    ) -> TimeInputs | None:
        """None: the sizes of the layers are not known."""
        sizes = layer_sizes(shapes)
        if sizes is None:
            return None
        return cls(sizes, shapes.parameters, trained_parameters(setting, shapes), rates, links)


@dataclass
class _Count:
    """Work of a rank's layers for one micro-batch: forward and backward."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0


NO_RATES = "the rates of this GPU are not known: run `pantheraml bench --calibrate` on it"
NO_SIZES = "the layers of this model are not alike, or its weights have unknown names"


def why_no_time(setting: Setting, given: TimeInputs) -> str | None:
    """Why the time of a step is not known; None: it is predicted."""
    rates, links = given.rates, given.links
    if setting.device == "cpu":
        return "times are predicted for GPUs only"
    if setting.devices_per_process > 1:
        return "one process uses several devices"
    needed = {"matmul_tflops." + _format(setting): rates.matmul_tflops.get(_format(setting))}
    needed |= {"attention_tflops": rates.attention_tflops, "copy_gb_s": rates.copy_gb_s}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        return f"{', '.join(missing)} of {rates.device} is not known: run `pantheraml bench --calibrate` on it"
    if setting.dims.world_size > 1 and (links is None or _unknown_link(setting, links) is not None):
        which = "links" if links is None else f"link of {_unknown_link(setting, links)} parallelism"
        return f"the bandwidth of the {which} is not known"
    return None


def predict_time(setting: Setting, given: TimeInputs) -> StepTime | None:
    """Seconds of a step of the slowest rank by part; None: not known, see `why_no_time`."""
    if why_no_time(setting, given) is not None:
        return None
    rates, sizes, dims = given.rates, given.sizes, setting.dims
    assert rates.attention_tflops is not None
    assert rates.copy_gb_s is not None
    sustained, eager_share, gap = (1.0, 1.0, 0.0) if given.bound else (SUSTAINED, EAGER_SHARE, GAP_SECONDS)
    flops = {name: rate * sustained for name, rate in rates.matmul_tflops.items()}
    attention_rate = rates.attention_tflops * 1e12 * sustained
    if not given.bound:
        attention_rate *= _length_factor(setting, sizes)
    copy = rates.copy_gb_s * 1e9 * sustained
    work = _layer_work(setting, sizes)
    layers, passes = sizes.layers / dims.pipeline, setting.accumulation
    again = 1.0 if setting.activation_checkpointing in ("full", "offload") else 0.0
    cheap_again = 1.0 if setting.activation_checkpointing != "none" else 0.0

    forward_rate = flops[_format(setting)] * 1e12
    weight_rate = flops[_format(setting, weights=True)] * 1e12
    frozen_backward, weight_backward = _backward_flops(setting, work)
    matmul = layers * ((1 + again) * work.forward_flops / forward_rate)
    matmul += layers * (frozen_backward / forward_rate + weight_backward / weight_rate)
    head_flops, head_bytes = _head_work(setting, sizes)
    head_matmul = head_flops / (flops["fp8" if _fp8_head(setting, sizes) else _plain(setting)] * 1e12)
    attention = layers * (1 + again * FORWARD_SHARE) * _attention_flops(setting, given) / attention_rate
    layer_copy = copy if setting.fused or setting.compile else copy * eager_share
    memory = layers * ((1 + cheap_again) * work.forward_bytes + work.backward_bytes) / layer_copy
    memory += (head_bytes + 8 * setting.tokens * sizes.hidden) / copy
    compute = matmul + head_matmul + attention + memory

    launch = layers * (1 + again / 3) * gap
    if not setting.cuda_graph and rates.launch_us is not None:
        host = layers * _launches(setting) * (1 + again / 3) * rates.launch_us * 1e-6
        launch = max(launch, host - compute)
    one = compute + launch
    parts = {
        "matmul": passes * (matmul + head_matmul),
        "attention": passes * attention,
        "memory": passes * memory,
        "communication": _communication(setting, given, one),
        "bubble": _bubble(setting) * passes * one,
        "launch": passes * launch,
        "optimizer": _optimizer_bytes(setting, given.trained) / copy,
    }
    return StepTime(parts, _sources(setting, given))


def least_seconds(setting: Setting, peaks: TimeInputs) -> float | None:
    """Seconds that no step can go below, whatever hides communication. `peaks`: with the rates of the data sheet."""
    time = predict_time(setting, replace(peaks, bound=True))
    return None if time is None else time.seconds - time.parts["communication"]


def _sources(setting: Setting, given: TimeInputs) -> tuple[str, ...]:
    told = [f"rates: {given.rates.source}"]
    if not setting.cuda_graph and given.rates.launch_us is None:
        told.append("the host's time to launch kernels is not known, and left out")
    if not setting.cuda_graph and given.rates.launch_us is not None and not (setting.fused or setting.compile):
        told.append("the host's time to launch unfused layers was not measured, and is taken from fused ones")
    window = given.sizes.window
    if window is not None and window < setting.seq_len:
        told.append(f"attention is counted over whole sequences: layers with a window of {window:,} tokens take less")
    if setting.packed and setting.seq_len > RATED_LENGTH:
        told.append("attention of packed rows is counted as of one document each: shorter documents take less")
    if setting.method == "dora":
        told.append("DoRA's norms of whole weights are not counted, so a step takes longer")
    if setting.activation_checkpointing == "offload":
        told.append("copies to host memory are counted as hidden behind the layers")
    if setting.dims.world_size > 1:
        told.append("communication: predicted from the bandwidth and latency of the links, not measured")
    return tuple(told)


def _launches(setting: Setting) -> int:
    """Kernels of a layer, in units of `launch_us`."""
    quick = (setting.fused or setting.compile) and not _fp8_layers(setting)
    return BF16_LAUNCHES_PER_LAYER if quick else LAUNCHES_PER_LAYER


def _plain(setting: Setting) -> str:
    return setting.precision


def _fp8_layers(setting: Setting) -> bool:
    """Decoder layers multiply in fp8: stored so, or filled from 4 bits by fused layers."""
    return setting.fp8_matmuls or (setting.fused and setting.frozen_weights in ("fp8", "nf4"))


def _fp8_head(setting: Setting, sizes: LayerSizes) -> bool:
    if setting.method == "full" or not _fp8_layers(setting):
        return False
    return not (setting.frozen_weights == "nf4" and sizes.tied)


def _format(setting: Setting, *, weights: bool = False) -> str:
    """Format of a layer's matmuls; `weights`: of those for the gradients of trained weights."""
    if not _fp8_layers(setting) or (weights and setting.fp8_matmuls and not setting.fused):
        return _plain(setting)
    return "fp8"


def _layer_work(setting: Setting, sizes: LayerSizes) -> _Count:
    """Matmuls and memory of one layer for one micro-batch on one rank."""
    tokens, split = setting.tokens, setting.dims.tensor
    weights = sizes.linear_parameters / split
    count = _Count(forward_flops=2.0 * tokens * weights, backward_flops=2.0 * tokens * weights)
    adapter = setting.method != "full"
    if adapter and setting.fused:
        count.forward_flops += 2.0 * tokens * LORA_COLUMNS * (3 * sizes.hidden + sizes.inner + sizes.queries) / split
    forward, backward = _bytes_per_token(setting, sizes)
    count.forward_bytes, count.backward_bytes = tokens * forward, tokens * backward
    if setting.frozen_weights is not None:
        fill = weights * (1 + _fill_bytes(setting.frozen_weights, fused=setting.fused))
        if not (setting.frozen_weights == "fp8" and setting.fused):
            count.forward_bytes += fill
        count.backward_bytes += 2 * weights if setting.frozen_weights == "fp8" and setting.fused else fill
    elif setting.fp8_matmuls:
        count.forward_bytes += 4 * weights  # scales and both layouts of the weights
        count.backward_bytes += 4 * weights
    return count


def _fill_bytes(stored: str, *, fused: bool) -> float:
    """Moved per weight to expand a stored weight for a product; a kernel of its own, which is not limited by memory."""
    return 1.7 if fused else {"fp8": 3.0, "int8": 3.0, "nf4": 2.6}[stored]


def _bytes_per_token(setting: Setting, sizes: LayerSizes) -> tuple[float, float]:
    """Bytes that the kernels of a layer move per token besides its matmuls and attention: forward, backward."""
    h, q, qkv = sizes.hidden, sizes.queries / setting.dims.tensor, sizes.qkv / setting.dims.tensor
    i = sizes.inner / setting.dims.tensor
    wide = (2 if sizes.gated else 1) * i
    adapter, norms = setting.method != "full", max(sizes.norms, 2)
    if not (setting.fused or setting.compile):
        return _eager_bytes(setting, sizes)
    if _fp8_layers(setting):  # norms, RoPE and activations also round their results to fp8
        forward = 7 * norms * h + 4 * qkv + 3 * q + 2 * wide + i
        backward = 8 * norms * h + 4 * qkv + 3 * wide + 6 * i + (3 if adapter else 6) * q
        gradients = 1.2 if adapter else 2.0
    else:
        forward = 8 * norms * h + 4 * qkv + 2 * wide + 2 * i
        backward = 8 * norms * h + 4 * qkv + 4 * wide + 4 * i + (4 * q if adapter and setting.fused else 0)
        gradients = 2.0 if adapter else 0.0
    # gradients of adapters read the inputs and output gradients of all groups of matrices
    return forward, backward + gradients * (4 * h + q + qkv + wide + i)


def _eager_bytes(setting: Setting, sizes: LayerSizes) -> tuple[float, float]:
    """The same for layers as transformers has them: each operation reads and writes memory, norms in fp32."""
    h, q, qkv = sizes.hidden, sizes.queries / setting.dims.tensor, sizes.qkv / setting.dims.tensor
    i = sizes.inner / setting.dims.tensor
    norms = max(sizes.norms, 2)
    normed = norms * h + sizes.normed_heads / setting.dims.tensor
    forward = 36 * normed + 12 * h + 18 * qkv + (10 if sizes.gated else 6) * i
    backward = 60 * normed + 12 * h + 22 * qkv + (18 if sizes.gated else 10) * i
    if setting.method != "full":
        inputs = 3 * h + q + (2 if sizes.gated else 1) * h + i
        outputs = qkv + h + (2 if sizes.gated else 1) * i + h
        forward += 6 * inputs + 14 * outputs
        backward += 10 * inputs + 10 * outputs
    return forward, backward


def _backward_flops(setting: Setting, work: _Count) -> tuple[float, float]:
    """Return a layer's FLOPs for the gradients of inputs, and of weights."""
    return work.backward_flops, (work.backward_flops if setting.method == "full" else 0.0)


def _attention_flops(setting: Setting, given: TimeInputs) -> float:
    """Forward and backward of one layer, below the diagonal.

    Documents packed into a row count as one: attention to each apart took as long in `packed_attention`'s record.
    """
    width = given.sizes.queries / setting.dims.tensor
    return 7.0 * setting.tokens * setting.seq_len * width


def _length_factor(setting: Setting, sizes: LayerSizes) -> float:
    """Rate of attention at this length, relative to that at `RATED_LENGTH`."""
    start = ATTENTION_START[64 if sizes.head_size is not None and sizes.head_size <= 64 else 128]
    return (1 + start / RATED_LENGTH) / (1 + start / setting.seq_len)


def _head_work(setting: Setting, sizes: LayerSizes) -> tuple[float, float]:
    logits = setting.tokens * sizes.vocab / setting.dims.tensor
    trained = setting.method == "full"
    return (6.0 if trained else 4.0) * logits * sizes.hidden, LOGIT_BYTES * logits


def _optimizer_bytes(setting: Setting, trained: int) -> float:
    dtype = setting.trained_weights if setting.method == "full" else "fp32"
    each = EIGHT_BIT_BYTES if setting.optimizer == "adamw8bit" else OPTIMIZER_BYTES[setting.optimizer, dtype]
    return each * trained / (shard_degree(setting) * setting.dims.tensor * setting.dims.pipeline)


def trained_parameters(setting: Setting, shapes: ModelShapes) -> int:
    if setting.method == "full":
        return shapes.parameters
    targets = setting.lora_targets
    return shapes.lora_parameters(setting.lora_rank, targets if isinstance(targets, str) else list(targets))


# -- several ranks


def _bubble(setting: Setting) -> float:
    """Idle time of a pipeline in units of its work."""
    stages = setting.dims.pipeline
    return (stages - 1) / (setting.stages_per_process * setting.accumulation)


def _unknown_link(setting: Setting, links: Links) -> str | None:
    dims = setting.dims
    used = [name for name in ("pipeline", "replicate", "shard", "context", "tensor") if getattr(dims, name) > 1]
    return next((name for name in used if links.bandwidth(dims, name) is None), None)


def _gathered_bytes(setting: Setting, given: TimeInputs) -> float:
    """Weights of a pass that ranks gather from each other, as they are stored."""
    if setting.method == "full":
        return given.parameters * (4.0 if setting.trained_weights == "fp32" else 2.0) / setting.dims.tensor
    stored = {None: 2.0, "fp8": 1.0, "int8": 1.0, "nf4": 0.53}[setting.frozen_weights]
    linear = given.sizes.linear_parameters * given.sizes.layers
    return (stored * linear + 2.0 * (given.parameters - linear)) / setting.dims.tensor


def _communication(setting: Setting, given: TimeInputs, compute: float) -> float:
    """Seconds of a step in which a rank waits for others; `compute`: seconds of a micro-batch's work."""
    dims, links, sizes = setting.dims, given.links, given.sizes
    if dims.world_size == 1:
        return 0.0
    assert links is not None
    again = 1 if setting.activation_checkpointing in ("full", "offload") else 0
    passes, rows = setting.accumulation, setting.tokens * 2.0  # bytes of one value per token
    layers = sizes.layers / dims.pipeline
    trained = given.trained / (dims.tensor * dims.pipeline)
    narrow = setting.method == "full" and setting.trained_weights == "bf16" and dims.shard == 1  # FSDP reduces in fp32
    gradient_bytes = trained * (2 if narrow else 4)
    waits = 0.0
    if dims.tensor > 1:
        each = links.reduce_seconds(dims, "tensor", rows * sizes.hidden) or 0.0
        waits += passes * layers * (4 + 2 * again) * each
    if dims.context > 1:
        moved = rows * (sizes.qkv + sizes.queries) / dims.tensor
        each = links.gather_seconds(dims, "context", moved) or 0.0
        waits += passes * layers * (2 + again) * each
        if dims.shard == 1:
            waits += links.reduce_seconds(dims, "context", gradient_bytes) or 0.0
    if dims.pipeline > 1:
        bandwidth = links.bandwidth(dims, "pipeline")
        assert bandwidth is not None
        each = links.latency(dims, "pipeline") + rows * sizes.hidden / bandwidth
        waits += 2 * passes * setting.stages_per_process * each
    if dims.shard > 1:
        sharing = dims.model_copy(update={"shard": dims.shard * dims.context, "context": 1})  # neighbors share weights
        each = 2 * (links.gather_seconds(sharing, "shard", _gathered_bytes(setting, given)) or 0.0)
        each += 2 * layers * links.latency(sharing, "shard")
        scattered = links.gather_seconds(sharing, "shard", gradient_bytes) or 0.0
        first = each / (2 * layers)  # nothing is at work while the first layer is gathered
        waits += (passes - 1) * max(first, each - compute) + max(first, each + scattered - compute)
    if dims.replicate > 1:
        reduced = links.reduce_seconds(dims, "replicate", gradient_bytes / shard_degree(setting)) or 0.0
        backward = compute * 2 / 3
        waits += max(0.05 * reduced, reduced - backward)  # the last bucket has nothing to hide behind
    return waits
