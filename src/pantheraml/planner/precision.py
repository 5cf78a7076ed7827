"""The one rule for number formats: compute precision, dtype of the weights, and fp8 for frozen weights.

`pantheraml train` and `FastLanguageModel` both ask here, so a script and a config file on the same GPU get the same
answer and the same reason. Formats are names (`bf16`), since this module does not import torch.

    GPU of compute capability 8.0 or newer       bf16
    older GPU                                    fp16, with loss scaling
    GPU of unknown capability                    fp32
    CPU                                          fp32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pantheraml.base.errors import ConfigError, DeviceError

Precision = Literal["fp32", "bf16", "fp16"]
Capability = tuple[int, int]

BF16_CAPABILITY: Capability = (8, 0)
FP8_CAPABILITY: Capability = (9, 0)
"""Row-wise scaled fp8 matmuls were measured on Hopper; Ada has not been measured."""

TORCH_NAMES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class PrecisionChoice(NamedTuple):
    value: Precision
    reason: str


class FP8Choice(NamedTuple):
    value: bool
    """Whether frozen weights are quantized to fp8."""
    reason: str


def parse_precision(given: object, *, setting: str = "dtype") -> Precision | None:
    """Resolve a name or a dtype: bf16, "bfloat16", "torch.bfloat16", torch.bfloat16. None and "auto": choose one."""
    name = "auto" if given is None else str(given).removeprefix("torch.")
    if name == "auto":
        return None
    for known, torch_name in TORCH_NAMES.items():
        if name in (known, torch_name):
            return known
    raise ConfigError(
        f"{setting}={given!r} is not one of {', '.join(TORCH_NAMES.values())}, auto.", fix="Use one of these."
    )


def choose_precision(
    requested: Precision | None, device: Literal["cpu", "cuda"], capabilities: Sequence[Capability | None]
) -> PrecisionChoice:
    """Choose what a run computes in; `capabilities`: those of the GPUs in use, of which the weakest decides."""
    if requested is not None:
        if requested == "fp16" and device == "cpu":
            raise DeviceError("fp16 needs a GPU: CPUs have no fast fp16.", fix="Use fp32 or bf16.")
        return PrecisionChoice(requested, "as configured")
    if device == "cpu":
        return PrecisionChoice("fp32", "CPUs are rarely faster in bf16, and fp32 is exact")
    known = [capability for capability in capabilities if capability is not None]
    if len(known) < max(1, len(capabilities)):
        return PrecisionChoice("fp32", "the compute capability is not known")
    weakest = min(known)
    version = f"compute capability {weakest[0]}.{weakest[1]}"
    if weakest >= BF16_CAPABILITY:
        return PrecisionChoice("bf16", f"{version} has bf16 tensor cores")
    return PrecisionChoice("fp16", f"{version} has no bf16; fp16 is used with loss scaling")


def choose_fp8(capabilities: Sequence[Capability | None], *, unfit: str | None = None) -> FP8Choice:
    """Choose whether frozen weights are quantized to fp8 if nothing else was requested.

    `unfit`: why fp8 was not measured to be faster in this setup; None: it was.
    """
    problem = why_no_fp8(capabilities) or unfit
    if problem is not None:
        return FP8Choice(False, problem)
    return FP8Choice(True, "fp8 tensor cores are the fastest, and the loss matches bf16 (docs/benchmarks.md, accuracy)")


def why_no_fp8(capabilities: Sequence[Capability | None]) -> str | None:
    """Return why these GPUs cannot use fp8 matmuls; None: they can, and so can a CPU, by the reference."""
    too_old = [capability for capability in capabilities if capability is None or capability < FP8_CAPABILITY]
    if not too_old:
        return None
    found = "one is not known" if too_old[0] is None else f"one has {too_old[0][0]}.{too_old[0][1]}"
    return f"fp8 needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer, and {found}"
