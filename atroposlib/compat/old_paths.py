"""Old import paths, of the public SDK and of this project, that lead to the present modules."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType

PUBLIC_PATHS = {
    "atroposlib.api": "atroposlib.compat.api",
    "atroposlib.envs.eval": "atroposlib.compat.evaluation",
    "atroposlib.envs.reward_fns.combined_reward": "atroposlib.compat.reward_fns.registry",
    "atroposlib.envs.reward_fns": "atroposlib.compat.reward_fns",
    "atroposlib.envs.teacher_distillation_env": "atroposlib.compat.teacher_distillation_env",
    "atroposlib.envs.server_handling.managed_server_proxy": "atroposlib.inference.proxy",
    "atroposlib.envs.server_handling.openai_server": "atroposlib.inference.client",
    "atroposlib.envs.server_handling.server_baseline": "atroposlib.inference.client",
    "atroposlib.envs.server_handling.server_harness": "atroposlib.inference.server_manager",
    "atroposlib.envs.server_handling.tool_call_translator": "atroposlib.inference.responses",
    "atroposlib.envs.server_handling.trl_vllm_server": "atroposlib.inference.client",
    "atroposlib.envs.server_handling": "atroposlib.inference",
    "atroposlib.frontend": "atroposlib.compat",
    "atroposlib.utils.advantages": "atroposlib.compat.utils",
    "atroposlib.utils.best_of_n_selection": "atroposlib.compat.utils",
    "atroposlib.utils.io": "atroposlib.compat.utils",
    "atroposlib.utils.message_history_utils": "atroposlib.compat.utils",
    "atroposlib.utils.tokenize_for_trainer": "atroposlib.compat.utils",
    "atroposlib.utils.tool_call_parser": "atroposlib.inference.responses",
}
"""Path in the public SDK -> ours."""
FORMER_PATHS = {
    "atroposlib.envs.rewards": "atroposlib.compat.reward_fns",
    "atroposlib.envs.tool_formats": "atroposlib.inference.responses",
    "atroposlib.inference.openai_server": "atroposlib.inference.client",
    "atroposlib.inference.sequence_tracker": "atroposlib.inference.managed_server",
    "atroposlib.inference.server_baseline": "atroposlib.inference.client",
    "atroposlib.inference.tool_calls": "atroposlib.inference.responses",
    "atroposlib.utils.thinking": "atroposlib.inference.responses",
}
"""Path that this project's own pages named before the modules moved -> the present one."""
OLD_PATHS = PUBLIC_PATHS | FORMER_PATHS
"""Modules below an old path are looked for below the present one. The first entry that fits
counts."""


def new_path(name: str) -> str | None:
    """Return the present path of a module; None if the path is not an old one.

    >>> new_path("atroposlib.envs.server_handling.openai_server"), new_path("atroposlib.compat.evaluation")
    ('atroposlib.inference.client', None)
    """
    for old, new in OLD_PATHS.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class OldPath(InspectLoader):
    """Loads an old path: what is found there is the very module of the new path, and not a second
    one like it.
    """

    def __init__(self, new: str):
        self.new = new
        self.own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of the new path."""
        module = importlib.import_module(self.new)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It ran when it was created.

        The import system has just given it this path's spec: it gets its own back.
        """
        module.__spec__ = self.own_spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m` with an old path."""
        loader = getattr(find_spec(self.new), "loader", None)
        return loader.get_code(self.new) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        """None: a traceback shows the new path's."""
        return None


class OldPaths(MetaPathFinder):
    """Finds the modules of `OLD_PATHS`.

    First of all finders: the others would load a file a second time under its old name.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an old path whose new one exists."""
        new = new_path(name)
        if new is None or (found := find_spec(new)) is None:
            return None
        return spec_from_loader(
            name,
            OldPath(new),
            origin=found.origin,
            is_package=found.submodule_search_locations is not None,
        )


def install_old_paths() -> None:
    """Let old paths be imported, in this process, from now on."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())
