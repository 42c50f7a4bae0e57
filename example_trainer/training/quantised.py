"""Moments of AdamW in 8 bits: which tensors have them, and the update on them, which is torchao's.

A block of QUANTISED_BLOCK elements shares one float32 scale, its greatest magnitude. An element is an index (uint8) into a
table of 256 values between -1 and 1, or 0 and 1, that are denser near 0 (Dettmers et al., arXiv:2110.02861).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

QUANTISED_BLOCK = 256
"""Elements that share a scale."""
_LEAST_ELEMENTS = 4096
"""Smaller tensors stay in float32, as in the paper: they take little memory, and norms need the precision."""


def can_be_quantised(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape has 8-bit moments.

    Rows must be whole blocks: then any range of rows has scales of its own, whatever rank or bucket holds it.
    """
    return len(shape) >= 2 and shape[-1] % QUANTISED_BLOCK == 0 and math.prod(shape) >= _LEAST_ELEMENTS
