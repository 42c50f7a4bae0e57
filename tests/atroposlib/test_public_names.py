"""Whatever an environment can import from the public package, atroposlib 0.4.0, it can import from ours.

public_names.json lists its modules, the names in them, the public members of classes, and the parameters of functions.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

PUBLIC: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("public_names.json").read_text())

ELSEWHERE = "only passed through there: import it from the module that has it"
ROUTES = "a route, for clients to call over HTTP: ours belong to a service with its store"
LEFT_OUT = {
    "atroposlib.envs.reward_fns.chandas_meter_reward": "needs a Sanskrit grammar engine",
    "atroposlib.api.server.GZipRequestMiddleware": "ours unpacks bodies where it bounds them, in gate.Gate",
    "atroposlib.api.server.MIN_ENV_WEIGHT": "the number 0.01; ours is scheduling.LEAST_WEIGHT",
    "atroposlib.api.server.Info": "the shape of an answer that nothing is made from",
    "atroposlib.api.server.Status": "the shape of an answer that nothing is made from",
    "atroposlib.api.server.ScoredData.validate_messages": "a step of validation; ours is in models.groups",
    **{
        f"atroposlib.api.server.{name}": ROUTES
        for name in (
            *("disconnect_env", "get_batch", "get_latest_example", "get_status", "get_status_env", "info", "register", "root"),
            *("register_env_url", "reset_data", "scored_data", "scored_data_list", "wandb_info"),
        )
    },
    "atroposlib.envs.server_handling.managed_server_proxy.SessionState.translator": "ours is within its managed_server",
    "atroposlib.envs.server_handling.server_manager.ServerManager.wait_for_sem": "each server of ours waits for its own slots",
    **{
        f"atroposlib.{name}": ELSEWHERE
        for name in (
            "api.server.find_groups_summing_to_target",
            "api.server.grab_batch_with_minimum_allocations",
            "api.server.grab_exact_from_heterogeneous_queue",
            *(f"envs.server_handling.managed_server_proxy.{x}" for x in ("DummyManagedServer", "OpenAIServer")),
            "envs.server_handling.managed_server_proxy.ToolCallTranslator",
            *(
                f"envs.server_handling.{x}_server.{name}"
                for x in ("openai", "sglang", "vllm")
                for name in ("NAMESPACE_SEP", "OPENAI_NAMESPACE")
            ),
        )
    },
    "atroposlib.frontend.jsonl2html.SCRIPT_DIR": "ours are templates beside the module",
    "atroposlib.frontend.jsonl2html.TEMPLATE_FILE": "ours are templates beside the module",
}
"""What ours does not have, and why."""


def parameters(found: Any) -> set[str] | None:
    """The names that may be given by keyword; None if any may."""
    listed = inspect.signature(found).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in listed):
        return None
    return {parameter.name for parameter in listed}


def members(found: Any) -> set[str]:
    """Names of attributes, fields and annotated attributes of a class."""
    annotated = {name for base in getattr(found, "__mro__", ()) for name in getattr(base, "__annotations__", {})}
    return set(dir(found)) | set(getattr(found, "model_fields", {})) | annotated


def missing() -> set[str]:
    """What the public package has and ours has not."""
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


def test_what_the_list_says_is_looked_for() -> None:
    assert len(PUBLIC) > 40
    assert PUBLIC["atroposlib.envs.base"]["BaseEnv"]["handle_send_to_api"]
    assert sum(len(names) for names in PUBLIC.values()) > 200


def test_the_servers_app_can_be_named_on_uvicorns_command_line(caplog: pytest.LogCaptureFixture) -> None:
    server = importlib.import_module("atroposlib.api.server")
    assert server.app is server.app
    assert {"/register", "/batch", "/scored_data"} <= {route.path for route in server.app.routes}
    with pytest.raises(AttributeError, match="has no attribute 'apps'"):
        _ = server.apps
