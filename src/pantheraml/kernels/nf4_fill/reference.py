"""The definition, in plain torch: also what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import to_e4m3
from pantheraml.kernels.nf4 import NF4Weight


def reference_fill(weight: NF4Weight, row_scales: Tensor, out: Tensor) -> None:
    out.copy_(to_e4m3(weight.dequantise(torch.float32) * (1 / row_scales)[:, None]))
