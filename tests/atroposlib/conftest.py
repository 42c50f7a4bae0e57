"""Fixtures for tests of the SDK: processes around an environment, and a tokenizer that needs no
download.
"""

from tests.atroposlib.envs.env_stack import shared_inference, stack, tokenizer, tokenizer_dir

__all__ = ["shared_inference", "stack", "tokenizer", "tokenizer_dir"]
