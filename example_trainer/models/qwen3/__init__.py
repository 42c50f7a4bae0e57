"""Qwen3 by itself: no server, no trainer."""

from example_trainer.models.qwen3.model_vllm_compat import Qwen3ModelArgs, Qwen3VLLMCompatModel

__all__ = ["Qwen3ModelArgs", "Qwen3VLLMCompatModel"]
