"""The same fixtures as for the SDK that the environments are written with."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "atroposlib" / "envs"))

from env_stack import shared_inference, stack, tokenizer, tokenizer_dir

__all__ = ["shared_inference", "stack", "tokenizer", "tokenizer_dir"]
