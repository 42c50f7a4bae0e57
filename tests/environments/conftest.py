"""The same fixtures as for the SDK that the environments are written with."""

from tests.atroposlib.envs.env_stack import shared_inference, stack, tokenizer, tokenizer_dir

__all__ = ["shared_inference", "stack", "tokenizer", "tokenizer_dir"]
