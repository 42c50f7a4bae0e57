"""Training with the bits that vLLM samples with: forward passes on its kernels, backward passes of our own in a fixed order.

from example_trainer.deterministic import Qwen3VLLMCompatModel, patch_batch_invariant_with_gradients
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Packing": "example_trainer.models.packing",
    "Qwen3ModelArgs": "example_trainer.models.qwen3",
    "Qwen3VLLMCompatModel": "example_trainer.models.qwen3",
    "VLLMCompatibleFlashAttention": "example_trainer.models.attention",
    "deterministic_decoder": "example_trainer.deterministic.pairing",
    "patch_batch_invariant_with_gradients": "example_trainer.batch_invariant_backward",
}


def __getattr__(name: str) -> Any:
    # Only when asked for: these modules import this package themselves.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_WHERE))}")
    return getattr(importlib.import_module(_WHERE[name]), name)
