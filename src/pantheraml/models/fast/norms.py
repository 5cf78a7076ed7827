"""RMSNorm as one kernel each way, in layers that are not fused.

In plain torch it is some six passes over memory forward and more backward, which keep a float32 copy of their input.
Classes are not known by name: any module that ends in RMSNorm, with one weight and one input, is compared with both
forms of the kernel, on random rows, and is left as it is if it computes something else. Compiled layers keep the plain
norm, which the compiler fuses with what surrounds it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.kernels.dispatch import references_only
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.fast.autograd_functions import fused_rms_norm
from pantheraml.models.fast.families import epsilon_of
from pantheraml.models.fast.residual_branch import Norm

SUFFIX = "RMSNorm"
TOLERANCE = 1e-4
"""Relative, in float32."""
_ROWS = 8


class FusedNorm(RuntimeSubclass):
    """Mixin placed before the class of a norm."""

    fused_plus_one: bool
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        in_bf16 = {hidden_states.dtype, self.weight.dtype} == {torch.bfloat16}
        if torch.compiler.is_compiling() or (hidden_states.is_cuda and not in_bf16):
            out: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return out
        norm = Norm(self.weight, epsilon_of(self), self.fused_plus_one)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return fused_rms_norm(hidden_states.flatten(0, -2), norm).view(hidden_states.shape)


def fuse_norm(norm: Any, *, plus_one: bool) -> None:
    """Fuse one norm, in place."""
    if not isinstance(norm, FusedNorm):
        kind: Any = type(norm)
        norm.fused_plus_one = plus_one
        norm.__class__ = derived(FusedNorm, kind)


def fuse_norms(modules: Iterable[nn.Module]) -> int:
    """Fuse the norms among `modules`, in place; return how many."""
    forms: dict[tuple[type, float], bool | None] = {}
    count = 0
    for norm in modules:
        if not _may_be_norm(norm):
            continue
        kind = type(norm), epsilon_of(norm)
        if kind not in forms:
            forms[kind] = _form_of(norm)
        plus_one = forms[kind]
        if plus_one is not None:
            fuse_norm(norm, plus_one=plus_one)
            count += 1
    return count


def _may_be_norm(norm: Any) -> bool:
    kind = type(norm)
    return (
        kind.__name__.endswith(SUFFIX)
        and not isinstance(norm, FusedNorm)
        and [name for name, _ in norm.named_parameters()] == ["weight"]
        and norm.weight.ndim == 1
        and not norm.weight.is_meta
        and not any(True for _ in norm.children())
        and len(inspect.signature(kind.forward).parameters) == 2
        and (isinstance(getattr(norm, "eps", None), float) or hasattr(norm, "variance_epsilon"))
    )


def _form_of(norm: nn.Module) -> bool | None:
    """Return whether this norm multiplies by 1 + weight, or by the weight; None: it computes something else."""
    draw = torch.Generator().manual_seed(0)
    try:
        plain: Any = copy.deepcopy(norm).float().cpu()
        weight = torch.randn(plain.weight.shape, generator=draw)
        plain.weight = nn.Parameter(weight)
        x = (3 * torch.randn(_ROWS, len(weight), generator=draw)).requires_grad_()
        g = torch.randn(x.shape, generator=draw)
        expected = _results(plain, plain.weight, x, g)
        for plus_one in (False, True):
            twin = copy.deepcopy(plain)
            fuse_norm(twin, plus_one=plus_one)
            with references_only():
                actual = _results(twin, twin.weight, x, g)
            if all(float((a - b).norm()) <= TOLERANCE * float(b.norm()) for a, b in zip(actual, expected, strict=True)):
                return plus_one
    except Exception:  # noqa: BLE001 - a class that fails on plain rows is of another kind
        return None
    return None


def _results(norm: nn.Module, weight: Tensor, x: Tensor, g: Tensor) -> list[Tensor]:
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        out = norm(x)
        return [out.detach(), *torch.autograd.grad(out, [x, weight], g)]


@functools.cache
def derived(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a fused layer or norm whose own class is `kind`."""
    return type(f"Fused{kind.__name__}", (mixin, kind), {"made_by": (derived, (mixin, kind))})
