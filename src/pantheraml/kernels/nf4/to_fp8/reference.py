"""Torch reference of the NF4 to e4m3 conversion, also used on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import to_e4m3
from pantheraml.kernels.nf4.format import NF4Weight


def reference_nf4_to_fp8(weight: NF4Weight, row_scales: Tensor, out: Tensor) -> None:
    out.copy_(to_e4m3(weight.dequantize(torch.float32) * (1 / row_scales)[:, None]))
