"""Runs Python programs that are not trusted, such as a model's.

docs/sandbox.md lists the attacks that it withstands.
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
