"""The number format that the fp8 ops share: e4m3 values with one float32 scale per row.

Scales bring a row's largest magnitude within a quarter of e4m3's range. The format is a floating one, so that costs no
precision, and it leaves the columns that an adapter adds to a row (see `lora_columns`) room to be larger. For the same
reason scales are powers of two, so that rows can be given other scales by changing exponents, without being rounded
again (see `turned_rows`). All that costs is that a row's largest value is rounded like the others: of 4,096 normally
distributed values 2.650 % are lost instead of 2.647 % (root mean square; of 64 values, 2.64 % instead of 2.50 %).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3 value; a cast of anything larger gives NaN, so values are clamped first."""
LIMIT = LARGEST / 4
"""A row's largest magnitude is put between half of this and this."""
E5M2 = torch.float8_e5m2
"""For the gradient of logits, most of which are small probabilities beside the label's gradient: one bit of mantissa
less, and a range of 2**31 down to the last normal value, where e4m3 has 2**15 and the small ones vanish."""
LARGEST_E5M2 = 57344.0
MOST_UNLIKE = 256.0
"""How much smaller a row may be than another that has the same scale."""
SMALLEST_SCALE = 2.0**-100
"""Of rows that are zero."""


def to_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST, LARGEST).to(E4M3)


def power_scale(magnitudes: Tensor, limit: float) -> Tensor:
    """The smallest powers of two that bring float32 `magnitudes` within `limit`. NaN for NaN, infinite for infinite.

    Limits are `LARGEST` or `LIMIT`, both 1.75 times a power of two. So the quotient needs no division, which a GPU
    rounds in its own way: above 1.75 a mantissa carries over into the exponent, and what is left of it is dropped.
    """
    within = magnitudes * (1.75 / limit)
    powers = ((within.view(torch.int32) + 0x1FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(within < torch.inf, powers, within).clamp(min=SMALLEST_SCALE)


def shared_scale(largest: Tensor) -> Tensor | None:
    """One scale for rows of these largest magnitudes: a power of two, so that payloads of several layers can be brought
    to a common one by changing their exponents. None if the rows are too unlike for one.

    The format is a floating one, so a row that is 256 times smaller than the largest still has all bits of its mantissa
    (values down to 2**-6 have, of 448).
    """
    high = largest.amax()
    if bool((largest[largest > 0] < high / MOST_UNLIKE).any()):
        return None
    return power_scale(high, LARGEST)


def row_scale(values: Tensor) -> Tensor:
    """[rows] float32, powers of two."""
    return power_scale(values.abs().amax(dim=-1).float(), LIMIT)
