"""The two tiers of tests: ./scripts/test.sh runs the default one, --all runs the nightly one too.

A file is nightly if its `pytestmark` has the mark, and belongs to the default tier otherwise. The
default tier has tests of every package, and one of every protocol with real processes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
PROTOCOLS = {
    "a service that is killed loses and doubles no group": (
        "tests/atroposlib/service/test_killed_service.py::"
        "test_three_kills_under_load_lose_nothing_and_double_nothing"
    ),
    "a weight update that breaks off leaves the old weights, and the next one heals": (
        "tests/e2e/test_weight_bridge.py::"
        "test_a_trainer_that_is_killed_before_its_first_write_leaves_the_old_version"
    ),
    "the quick start trains a model": (
        "tests/e2e/test_quickstart.py::test_a_short_run_leaves_everything_that_is_promised"
    ),
    "service, environment, vLLM and trainer train together, whichever is killed": (
        "tests/e2e/test_kill_each_process.py::test_the_run_survives_the_death_of_each_process"
    ),
    "two deterministic runs have equal bits": (
        "tests/example_trainer/deterministic/test_parity.py::"
        "test_equal_runs_have_equal_hashes_and_packing_does_not_matter"
    ),
    "the page in a browser": (
        "tests/atroposlib/dashboard/test_sign_in_page.py::"
        "test_the_key_lets_in_and_a_wrong_one_does_not"
    ),
}
"""Protocol -> the test of the default tier that runs it with real processes."""
SMOKE_TESTS = (
    "test_kill_each_process",
    "test_quickstart",
    "test_weight_bridge",
)
"""Files of tests/e2e in the default tier. They take a quarter of its time, so they stay few."""
PACKAGES = (
    "atroposlib",
    "bench",
    "environments",
    "example_trainer",
    "scripts",
    "studies",
    "vllm_patching",
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def marks_in(path: Path) -> tuple[int, bool]:
    """Return how often a file uses the mark `nightly`, and whether it marks the whole file."""
    text = path.read_text(encoding="utf-8")
    if "nightly" not in text:
        return 0, False
    tree = ast.parse(text)
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "nightly"
    ]
    whole = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and ".nightly" in ast.unparse(node.value)
    ]
    return len(uses), bool(whole)


MARKS = {name(path): marks_in(path) for path in FILES}
DEFAULT = [file for file, (_, whole) in MARKS.items() if not whole]


def test_every_file_is_in_one_tier() -> None:
    """A mark on a single test would split a file, and with it the servers that its tests share."""
    assert [file for file, (uses, whole) in MARKS.items() if uses != whole] == []
    assert 0 < len(DEFAULT) < len(FILES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_has_a_test_in_the_default_tier(protocol: str) -> None:
    file, _, test = PROTOCOLS[protocol].partition("::")
    assert file in DEFAULT
    names = [getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body]
    assert test in names


def test_the_smoke_tests_are_the_default_tier_of_the_end_to_end_tests() -> None:
    stems = [Path(file).stem for file in DEFAULT if file.startswith("tests/e2e/")]
    assert stems == sorted(SMOKE_TESTS)


def folders_with_tests() -> list[str]:
    """List the folders that mirror a package, down to the last one."""
    folders = {name(path.parent) for path in FILES}
    return sorted(
        folder for folder in folders if folder.split("/")[1:2] and folder.split("/")[1] in PACKAGES
    )


@pytest.mark.parametrize("folder", folders_with_tests())
def test_every_package_has_tests_in_the_default_tier(folder: str) -> None:
    assert [file for file in DEFAULT if file.startswith(f"{folder}/")] != []


def test_no_package_is_without_tests() -> None:
    assert {folder.split("/")[1] for folder in folders_with_tests()} == set(PACKAGES)
