"""Training with the bits that vLLM samples with: forward passes on its kernels, backward passes of
our own in a fixed order.

from example_trainer.deterministic import Qwen3VLLMCompatModel, init_batch_invariance,
patch_batch_invariant_with_gradients
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "example_trainer.models.packing": ["Packing"],
    "example_trainer.models.qwen3": [
        "Qwen3ModelArgs",
        "Qwen3StateDictAdapter",
        "Qwen3VLLMCompatModel",
        "torchtitan_to_vllm_compat",
        "vllm_compat_to_torchtitan",
    ],
    "example_trainer.models.attention": ["FlashAttnWithBackward", "VLLMCompatibleFlashAttention"],
    "example_trainer.deterministic.pairing": ["deterministic_decoder"],
    "example_trainer.batch_invariant_backward": [
        "VLLMRMSNorm",
        "enable_batch_invariant_backward_mode",
        "init_batch_invariance",
        "patch_batch_invariant_with_gradients",
        "rms_norm_with_gradients",
        "silu_and_mul_with_gradients",
    ],
}
"""Module -> the names that this package has from it."""
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    # Only when asked for: these modules import this package themselves.
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_MODULE_OF))}"
        )
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
