"""LoRA on stacked experts (PEFT's `target_parameters`) as grouped matmuls, without a dense copy of the experts.

PEFT adds B A to the weights of all experts in every forward, and backward computes the gradient of all of them, of the
size of the weights again: 1.1 GiB each per layer in the shape of Qwen3-30B-A3B. Here tokens are sorted by expert, and
y = x W + s (x A) B are three grouped matmuls, each expert's tokens being one group. Frozen weights get no gradient.

The wrapper of PEFT stays where it is, with its parameters, files and switches; its instance gets a subclass of its own
class, which falls back to PEFT's forward with merged, disabled or several adapters. Experts of each class are compared
with PEFT's forward first, on a small model of that architecture.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.tiny_model import CannotShrinkError, tiny_model

logger = log.get(__name__)

FIRST, SECOND = "gate_up_proj", "down_proj"
"""Names of the stacked weights in every experts class of transformers with a gate."""
TOLERANCE = 1e-3
"""Relative, in float32: only the order of sums differs."""
_ALIGNMENT = 16
"""Bytes: strides of the operands of a grouped matmul are multiples of it."""
_CHECKED_TOKENS = 12
_NEWER = "has_post_expert_norm", "_is_expert_parallel"
"""What experts of later releases of transformers may have, and those of 5.17 do not."""


class StackedAdapter(NamedTuple):
    """LoRA of a stacked weight. The rank is padded with zeros to what grouped matmuls can read."""

    down: Tensor
    """[experts, in, rank]"""
    up: Tensor
    """[experts, rank, out]"""
    scaling: float

    @classmethod
    def of(cls, wrapper: Any, dtype: torch.dtype) -> StackedAdapter:
        name = wrapper.active_adapters[0]
        experts, rank = wrapper.num_experts, wrapper.r[name]
        down = wrapper.lora_A[name].weight.to(dtype).view(experts, rank, -1)
        up = wrapper.lora_B[name].weight.to(dtype).view(-1, rank, experts).permute(2, 1, 0)
        missing = -rank % (_ALIGNMENT // dtype.itemsize)
        if missing:
            down, up = (F.pad(part, (0, 0, 0, missing)) for part in (down, up))
        return cls(down.transpose(1, 2), up.contiguous(), wrapper.scaling[name])


def speed_up_experts(model: nn.Module) -> Counter[str]:
    """Run LoRA on stacked experts as grouped matmuls, in place; return why some are left to PEFT, with counts."""
    reasons: Counter[str] = Counter()
    inner = {id(wrapper.base_layer) for wrapper in model.modules() if isinstance(wrapper, ParamWrapper)}
    outermost = [m for m in model.modules() if isinstance(m, ParamWrapper) and id(m) not in inner]
    differences: dict[type, str | None] = {}
    changed = 0
    for wrapper in outermost:
        if isinstance(wrapper, _GroupedLora):
            continue
        experts = wrapper.get_base_layer()
        reason = _why_not(wrapper, experts)
        if reason is None:
            if type(experts) not in differences:
                differences[type(experts)] = _why_not_equal(getattr(model, "config", None), type(experts))
            reason = differences[type(experts)]
        if reason is None:
            _group(wrapper)
            changed += 1
        else:
            reasons[reason] += 1
    if changed:
        logger.info("adapters of the experts in %d layers run as grouped matmuls", changed)
    for reason, count in reasons.items():
        logger.info("adapters of the experts in %d layers are added to all of their weights: %s", count, reason)
    return reasons


def _wrappers(outermost: Any) -> list[Any]:
    """Return the nested wrappers of one experts module, one per adapted weight."""
    found = [outermost]
    while isinstance(found[-1].base_layer, ParamWrapper):
        found.append(found[-1].base_layer)
    return found


def _why_not(outermost: Any, experts: Any) -> str | None:
    """Return why these experts cannot run as grouped matmuls, or None."""
    name = type(experts).__name__
    if not (getattr(experts, "has_gate", False) and hasattr(experts, "_apply_gate")):
        return f"{name} is not an experts class of transformers with a gate"
    if any(getattr(experts, name, False) for name in _NEWER):
        return f"{name} has a norm after its experts, or is split over devices"
    if not {wrapper.parameter_name for wrapper in _wrappers(outermost)} <= {FIRST, SECOND}:
        return f"other weights of {name} than {FIRST} and {SECOND} are adapted"
    weight = getattr(experts, FIRST)
    sizes = [size for part in (FIRST, SECOND) for size in getattr(experts, part).shape[1:]]
    if any(size * weight.element_size() % _ALIGNMENT for size in sizes):
        return f"sizes of {name} are not multiples of {_ALIGNMENT} bytes"
    if weight.is_cuda and (weight.dtype != torch.bfloat16 or torch.cuda.get_device_capability(weight.device) < (8, 0)):
        return "grouped matmuls need bfloat16, and a GPU of compute capability 8.0"
    return None


class _GroupedLora(RuntimeSubclass):
    """Mixin placed before PEFT's wrapper of stacked experts, the outermost one."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wrappers = _wrappers(self)
        experts: Any = wrappers[-1].base_layer
        plain = (
            len(args) != 2
            or kwargs
            or x.ndim != 2
            or any(w.disable_adapters or w.merged_adapters or len(w.active_adapters) != 1 for w in wrappers)
            or any(w.active_adapters[0] not in w.lora_A for w in wrappers)
            or (x.is_cuda and getattr(experts, FIRST).dtype != torch.bfloat16)
        )
        if plain:
            out: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return out
        adapters = {w.parameter_name: StackedAdapter.of(w, getattr(experts, w.parameter_name).dtype) for w in wrappers}
        return run_experts(experts, adapters, x, *args)


def _group(wrapper: Any) -> None:
    kind: Any = type(wrapper)
    wrapper.__class__ = _derived(kind)


@functools.cache
def _derived(kind: type) -> type:
    return type(f"Grouped{kind.__name__}", (_GroupedLora, kind), {"made_by": (_derived, (kind,))})


def run_experts(
    experts: Any, adapters: dict[str, StackedAdapter], x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs. x: [tokens, width]; chosen, weights: [tokens, top_k]."""
    top_k = chosen.shape[-1]
    by_expert, order = chosen.flatten().sort(stable=True)
    # histc takes floats on a CPU, and with deterministic algorithms only integers on a GPU
    counted = by_expert.int() if x.is_cuda else by_expert.float()
    ends = torch.histc(counted, experts.num_experts, 0, experts.num_experts - 1).cumsum(0, dtype=torch.int32)
    rows = x[order // top_k].to(getattr(experts, FIRST).dtype)
    for name in (FIRST, SECOND):
        rows = _grouped_linear(rows, experts, name, adapters.get(name), by_expert, ends)
        if name == FIRST:
            rows = experts._apply_gate(rows)
    rows = rows * weights.flatten()[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].unflatten(0, (-1, top_k)).sum(1).to(x.dtype)


def _grouped_linear(
    rows: Tensor, experts: Any, name: str, adapter: StackedAdapter | None, by_expert: Tensor, ends: Tensor
) -> Tensor:
    weight = getattr(experts, name)
    out = F.grouped_mm(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=ends)
    if adapter is not None:
        middle = F.grouped_mm(rows, adapter.down, offs=ends) * adapter.scaling
        out = out + F.grouped_mm(middle, adapter.up, offs=ends)
    return out + getattr(experts, f"{name}_bias")[by_expert] if experts.has_bias else out


def _why_not_equal(config: Any, kind: type) -> str | None:
    """Return how experts of this class differ from PEFT's forward, in a small model of this architecture."""
    name = kind.__name__
    try:
        with torch.random.fork_rng(devices=[]):
            small: Any = tiny_model(config)
            config = LoraConfig(r=3, lora_alpha=6, target_modules=[], target_parameters=[FIRST, SECOND])
            wrapper = next(m for m in get_peft_model(small, config).modules() if isinstance(m, ParamWrapper))
            if type(wrapper.get_base_layer()) is not kind:
                return f"a small model of its architecture has no {name}"
            theirs = _run(wrapper)
            _group(wrapper)
            ours = _run(wrapper)
    except CannotShrinkError as err:
        return f"a small model to compare {name} on cannot be built: {err}"
    except Exception as err:  # noqa: BLE001 - another release's code may raise anything; the reason is reported
        return f"comparing {name} failed: {type(err).__name__}: {next(iter(str(err).splitlines()), '')}"
    distance = max(float((own - other).norm() / other.norm()) for own, other in zip(ours, theirs, strict=True))
    return None if distance <= TOLERANCE else f"{name} differs by {distance:.0%} in this version of transformers"


def _run(wrapper: Any) -> list[Tensor]:
    """Return output and gradients of the input, the routing weights and all adapters, for random values."""
    draw = torch.Generator().manual_seed(0)
    trained = [parameter for name, parameter in wrapper.named_parameters() if "lora_" in name]
    for parameter in trained:
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) / 8)
    experts = wrapper.get_base_layer()
    width = getattr(experts, SECOND).shape[2 if experts.is_transposed else 1]
    x = torch.randn(_CHECKED_TOKENS, width, generator=draw, requires_grad=True)
    count = min(2, experts.num_experts)
    scores = torch.rand(_CHECKED_TOKENS, experts.num_experts, generator=draw)
    weights, chosen = scores.topk(count)
    weights.requires_grad_()
    out = wrapper.forward(x, chosen, weights)
    g = torch.randn(out.shape, generator=draw)
    return [out.detach(), *torch.autograd.grad(out, [x, weights, *trained], g)]
