"""A plugin of vLLM's that takes an architecture off the table of families.

So a server learns the layout of a model that the table knows. The folder `plugin` beside this file
names it to vLLM, which calls it in each of its processes.
"""

from __future__ import annotations

import os

from bench.gpu.engine_clock import variables

ARCHITECTURE = "LOCKSTEP_UNLISTED"
"""The variable that names the architecture; without it the table stays whole."""


def install() -> None:
    """Take the named architecture off the table of this process."""
    name = os.environ.get(ARCHITECTURE)
    if name:
        from vllm_patching.weights.families import FAMILIES

        FAMILIES.pop(name, None)


def server_variables(architecture: str) -> dict[str, str]:
    """For the environment of a server that is to learn this architecture's layout."""
    return variables(architecture, ARCHITECTURE)
