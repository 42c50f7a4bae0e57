"""Public import paths and names, and the page made of messages."""

from __future__ import annotations

import importlib
import inspect
import json
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

import pytest

from atroposlib.compat.jsonl2html import create_html_for_group, generate_html, get_score_class
from atroposlib.compat.old_paths import OLD_PATHS, PUBLIC_PATHS, OldPaths, new_path

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


PUBLIC_OLD_PATHS = json.loads(Path(__file__).with_name("public_names.json").read_text())


@pytest.mark.parametrize("old", OLD_PATHS)
def test_an_old_path_is_the_module_itself(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(OLD_PATHS[old])
    assert module.__name__ == module.__spec__.name == OLD_PATHS[old]  # type: ignore[union-attr]


@pytest.mark.parametrize("old", PUBLIC_PATHS)
def test_a_public_path_has_a_user(old: str) -> None:
    assert old in PUBLIC_OLD_PATHS or any(name.startswith(f"{old}.") for name in PUBLIC_OLD_PATHS)


def test_what_lies_below_is_the_same_too() -> None:
    below = [
        name for name in PUBLIC_OLD_PATHS if new_path(name) is not None and name not in OLD_PATHS
    ]
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


def test_groups_become_a_page_in_which_nothing_of_a_rollout_is_markup(tmp_path: Path) -> None:
    groups = [
        {"messages": ["plain <b>text</b>", "other"], "scores": [1.0, -0.5]},
        {"tokens": [[1]], "scores": [1.0]},
        {
            "messages": [
                [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
            ],
            "scores": [0],
        },
    ]
    source = tmp_path / "groups.jsonl"
    source.write_text("\n".join(json.dumps(group) for group in groups) + "\n\n")
    generate_html(source)
    page = source.with_suffix(".html").read_text()
    assert "plain &lt;b&gt;text&lt;/b&gt;" in page
    assert page.count("<details") == page.count("</details>") == 2, (
        "a group without messages is left out"
    )
    assert "Group 3: 1 rollouts, scores 0" in page
    assert "<b>assistant</b>\n4" in page
    generate_html(str(source), str(tmp_path / "other.html"))
    assert (tmp_path / "other.html").read_text() == page
    assert create_html_for_group(groups[1], 0) == ""


def test_a_line_that_is_no_group_is_named(tmp_path: Path) -> None:
    source = tmp_path / "groups.jsonl"
    source.write_text(
        '{"messages": ["a"], "scores": [1]}\n{"messages": ["a", "b"], "scores": [1]}\n'
    )
    with pytest.raises(ValueError, match=r"groups\.jsonl, line 2 is not a group"):
        generate_html(source)
    source.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1 is not a group"):
        generate_html(source)


def test_classes_of_scores() -> None:
    assert [get_score_class(score) for score in (-1, 0.0, 0.3, None)] == [
        "reward-negative",
        "reward-zero",
        "reward-positive",
        "",
    ]
