"""What environments written for the public SDK expect, where ours differs: old import paths, settings that are no more.

The rest of the package knows nothing of it, but for the settings that derive from `WarnsOfUnknownKeys`.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel, model_validator

logger = logging.getLogger(__name__)

OLD_PATHS = {
    "atroposlib.envs.eval": "atroposlib.envs.evaluation",
    "atroposlib.envs.reward_fns": "atroposlib.envs.rewards",
    "atroposlib.envs.server_handling": "atroposlib.inference",
}
"""Path in the public SDK -> ours. What lies below the one is looked for below the other."""


def new_path(name: str) -> str | None:
    """Where the module of an old path is now; None for a path that is none of the old ones.

    >>> new_path("atroposlib.envs.server_handling.openai_server"), new_path("atroposlib.envs.evaluation")
    ('atroposlib.inference.openai_server', None)
    """
    if name.startswith("atroposlib.envs."):
        for old, new in OLD_PATHS.items():
            if name == old or name.startswith(f"{old}."):
                return new + name.removeprefix(old)
    return None


class OldPath(InspectLoader):
    """Loads an old path: what is found there is the very module of the new path, and not a second one like it."""

    def __init__(self, new: str):
        self.new = new
        self.own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of the new path."""
        module = importlib.import_module(self.new)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It ran when it was created. The import system has just given it this path's spec: it gets its own back."""
        module.__spec__ = self.own_spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m` with an old path."""
        loader = getattr(find_spec(self.new), "loader", None)
        return loader.get_code(self.new) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        """None: a traceback shows the new path's."""
        return None


class OldPaths(MetaPathFinder):
    """Finds the modules of `OLD_PATHS`. First of all finders: the others would load a file a second time under its old name."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of an old path whose new one exists."""
        new = new_path(name)
        found = None if new is None else find_spec(new)
        if new is None or found is None:
            return None
        return spec_from_loader(
            name, OldPath(new), origin=found.origin, is_package=found.submodule_search_locations is not None
        )


def install_old_paths() -> None:
    """Let old paths be imported, in this process, from now on."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())


class WarnsOfUnknownKeys(BaseModel):
    """Unknown keys from a flag or a YAML file are refused by the command line; from Python code they only warn.

    Environments written for other versions of the interface name settings that no longer exist in their `config_init`;
    they are to run unchanged.
    """

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data.keys() - cls.model_fields.keys():
                logger.warning("%s has no setting named %r: it is ignored", cls.__name__, key)
        return data
