"""Qwen3 by itself: no server, no trainer."""

from example_trainer.models.qwen3.args import Qwen3ModelArgs
from example_trainer.models.qwen3.model_vllm_compat import Qwen3VLLMCompatModel
from example_trainer.models.qwen3.state_dict_adapter import (
    Qwen3StateDictAdapter,
    torchtitan_to_vllm_compat,
    vllm_compat_to_torchtitan,
)

__all__ = [
    "Qwen3ModelArgs",
    "Qwen3StateDictAdapter",
    "Qwen3VLLMCompatModel",
    "torchtitan_to_vllm_compat",
    "vllm_compat_to_torchtitan",
]
