"""The trainer's model: one decoder in vLLM's parameter layout, and Hugging Face checkpoints in and
out of it.
"""

from example_trainer.models.decoder import Decoder
from example_trainer.models.hf_checkpoint import load_model, save_model
from vllm_patching.weights.families import Geometry

__all__ = ["Decoder", "Geometry", "load_model", "save_model"]
