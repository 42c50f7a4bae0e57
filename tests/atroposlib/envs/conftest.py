"""Fixtures for tests of environments."""

from env_stack import shared_inference, stack, tokenizer, tokenizer_dir

__all__ = ["shared_inference", "stack", "tokenizer", "tokenizer_dir"]
