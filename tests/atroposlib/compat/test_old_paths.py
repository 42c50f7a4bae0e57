"""Public import paths lead to the modules of ours, and to no second copy of them."""

from __future__ import annotations

import importlib
import json
from importlib.abc import InspectLoader
from pathlib import Path

import pytest

from atroposlib.compat.old_paths import OLD_PATHS, PUBLIC_PATHS, OldPaths, new_path

PUBLIC = json.loads(Path(__file__).with_name("public_names.json").read_text())


@pytest.mark.parametrize("old", OLD_PATHS)
def test_an_old_path_is_the_module_itself(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(OLD_PATHS[old])
    assert module.__name__ == module.__spec__.name == OLD_PATHS[old]  # type: ignore[union-attr]


@pytest.mark.parametrize("old", PUBLIC_PATHS)
def test_a_public_path_has_a_user(old: str) -> None:
    assert old in PUBLIC or any(name.startswith(f"{old}.") for name in PUBLIC)


def test_what_lies_below_is_the_same_too() -> None:
    below = [name for name in PUBLIC if new_path(name) is not None and name not in OLD_PATHS]
    assert len(below) >= 5
    for name in below:
        assert importlib.import_module(name) is importlib.import_module(str(new_path(name)))


def test_what_is_at_neither_path_is_missed_by_the_name_that_was_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"atroposlib\.envs\.server_handling\.nothing"):
        importlib.import_module("atroposlib.envs.server_handling.nothing")
    assert new_path("atroposlib.compat.evaluation") is None


def test_a_program_can_be_run_by_its_old_path() -> None:
    """`python -m` asks the path's loader for the code."""
    old = "atroposlib.envs.server_handling.managed_server_proxy"
    spec = OldPaths().find_spec(old)
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    code = spec.loader.get_code(old)
    assert code is not None
    assert Path(code.co_filename).parts[-3:] == ("atroposlib", "inference", "proxy.py")
