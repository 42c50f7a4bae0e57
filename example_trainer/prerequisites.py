"""One line for a package that is missing, in place of a traceback.

Standard library only: a command calls `explain_missing_packages` before its other imports.
"""

from __future__ import annotations

import sys
from types import TracebackType

from example_trainer.errors import ConfigError
from vllm_patching.compat.versions import INSTALL_VLLM, UnsupportedVllm, require_supported

OWN = ("atroposlib", "environments", "example_trainer", "vllm_patching")
REQUIREMENTS = "`pip install -r example_trainer/requirements.txt`"
COMMANDS = {
    "torch": INSTALL_VLLM,
    "vllm": INSTALL_VLLM,
    "ray": "`pip install 'ray[default]==2.60.0'`",
    "wandb": "`pip install wandb`",
    "datasets": "`pip install datasets`",
}
"""Package -> the command that installs it, for packages that are not in the trainer's
requirements."""
IN_REQUIREMENTS = {
    "anyio", "fastapi", "httptools", "httpx", "huggingface_hub", "jinja2", "matplotlib", "numpy", "openai", "orjson",
    "prometheus_client", "psutil", "pydantic", "rich", "safetensors", "tensorboard", "torchao", "transformers",
    "uvicorn", "yaml",
}  # fmt: skip
"""Packages of example_trainer/requirements.txt, by the name that is imported."""


def missing_package(error: ImportError) -> str | None:
    """The line that names the package which an import failed for, and the command that installs it.

    Returns:
        None if a module of this project is missing, or the package is there and broken.
    """
    package = (error.name or "").partition(".")[0]
    if (
        not isinstance(error, ModuleNotFoundError)
        or not package
        or package in OWN
        or sys.modules.get(package) is not None
    ):
        return None
    if package in IN_REQUIREMENTS:
        command = REQUIREMENTS
    else:
        command = COMMANDS.get(package, f"`pip install {package}`")
    return f"the package {package} is not installed: {command}"


def explain_missing_packages() -> None:
    """Have an import of a missing package end this process with one line and exit status 1."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = missing_package(error) if isinstance(error, ImportError) else None
        if line is None:
            before(kind, error, trace)
        else:
            print(f"ERROR {line}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def require_vllm() -> None:
    """Raise ConfigError, with the command that installs it, unless a supported vLLM is installed.

    Imports nothing of it.
    """
    try:
        require_supported()
    except UnsupportedVllm as error:
        raise ConfigError(str(error)) from error
