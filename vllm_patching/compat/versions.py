"""Which vLLM is installed, and whether the project supports it."""

from __future__ import annotations

import importlib

SUPPORTED = ">= 0.26 and < 0.33"


class UnsupportedVllm(RuntimeError):
    """vLLM is missing, or is a version in which a seam that the project uses cannot be found."""


def vllm_version() -> str:
    """The version of the vLLM that is imported, which a CPU build under another distribution name reports too."""
    return str(importlib.import_module("vllm").__version__)


def seam_missing(seam: str) -> str:
    """What is wrong where `seam`, as Python names it, is not there, and what to do."""
    return f"this vLLM ({vllm_version()}) does not have {seam}; install a version {SUPPORTED}"
