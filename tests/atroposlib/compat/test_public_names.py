"""Every name that Atropos' environments, and its tests of API and utilities, import can be imported
from here too.

list_public_names.py wrote public_names.json: modules, names in them, public members of classes,
parameters of functions.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

PUBLIC: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("public_names.json").read_text()
)

LEFT_OUT = {
    "atroposlib.envs.server_handling.server_manager.ServerManager.wait_for_sem": "each server of ours waits for its own slots",
    "atroposlib.envs.server_handling.tool_call_translator.VLLM_AVAILABLE": "tells tests to skip; ours reads calls without vLLM",
}
"""Names that are missing here, and why."""


def parameters(found: Any) -> set[str] | None:
    """The names that may be given by keyword; None if any may."""
    listed = inspect.signature(found).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in listed):
        return None
    return {parameter.name for parameter in listed}


def members(found: Any) -> set[str]:
    """Names of attributes, fields and annotated attributes of a class."""
    annotated = {
        name
        for base in getattr(found, "__mro__", ())
        for name in getattr(base, "__annotations__", {})
    }
    return set(dir(found)) | set(getattr(found, "model_fields", {})) | annotated


def missing() -> set[str]:
    """Names that the public package has and ours has not."""
    gone: set[str] = set()

    def compare(where: str, found: Any, wanted: list[str]) -> None:
        have = parameters(found)
        if have is not None:
            gone.update(f"{where}({name})" for name in set(wanted) - have)

    for module_name, names in PUBLIC.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            gone.add(module_name)
            continue
        for name, facts in names.items():
            where = f"{module_name}.{name}"
            if f"{module_name}.{name}" in PUBLIC:  # a module in a package
                continue
            if not hasattr(module, name):
                gone.add(where)
                continue
            found = getattr(module, name)
            if isinstance(facts, list):
                compare(where, found, facts)
            for member, wanted in facts.items() if isinstance(facts, dict) else ():
                if member not in members(found):
                    gone.add(f"{where}.{member}")
                elif isinstance(wanted, list) and callable(getattr(found, member, None)):
                    compare(f"{where}.{member}", getattr(found, member), wanted)
    return gone


def test_every_public_name_is_there_or_is_left_out_for_a_reason() -> None:
    assert missing() == set(LEFT_OUT)


def test_the_list_is_not_empty() -> None:
    assert PUBLIC["atroposlib.envs.base"]["BaseEnv"]["handle_send_to_api"]
    assert sum(len(names) for names in PUBLIC.values()) > 50
