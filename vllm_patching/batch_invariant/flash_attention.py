"""Which FlashAttention deterministic mode runs on a GPU: both sides choose by its compute
capability alone.
"""

from __future__ import annotations

OLDEST_CAPABILITY = 80
"""The oldest GPUs with FlashAttention 2 and bfloat16: Ampere."""
_HOPPER = 9


def flash_attention_version(major: int) -> int:
    """Return 3 on Hopper and 2 on any other GPU.

    FlashAttention 3 consists of Hopper's wgmma instructions. FlashAttention 4 is left out on
    Blackwell, because the version must be one that both sides can pin.

    Args:
        major: of the compute capability.
    """
    return 3 if major == _HOPPER else 2
