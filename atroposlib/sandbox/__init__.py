"""Runs Python programs that nobody trusts, such as those that a model writes.

What it holds against: docs/sandbox.md.
"""

from atroposlib.sandbox.contract import (
    ISOLATIONS,
    Limits,
    Outcome,
    Program,
    Raised,
    Returned,
    Sandbox,
    SandboxBroken,
    SandboxUnavailable,
)
from atroposlib.sandbox.local import LocalSandbox

__all__ = [
    "ISOLATIONS",
    "Limits",
    "LocalSandbox",
    "Outcome",
    "Program",
    "Raised",
    "Returned",
    "Sandbox",
    "SandboxBroken",
    "SandboxUnavailable",
]
