"""mutations.py: what a mutant changes, which mutants are drawn, and which of them tests kill."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.mutations import (
    MODULES,
    ROOT,
    first_failure,
    mirrored_tests,
    mutant,
    sample,
    sites_of,
)
from tests.test_tiers import DEFAULT

pytestmark = pytest.mark.nightly

SOURCE = '''"""Text of a module."""
LIMIT: int = 3


def share(values, logger, most=2):
    """Return a share."""
    logger.info("asked")
    values.append(1)
    if not values or len(values) > LIMIT and most is not None:
        raise ValueError(f"more than {LIMIT + 1}")
    return sum(values) / most
'''
BOTH = "len(values) > LIMIT and most is not None"
CHANGES = {
    ("constant", "3", "4"),
    ("constant", "2", "3"),
    ("constant", "1", "2"),
    ("removed statement", "values.append(1)", "pass"),
    ("boolean", f"not values or ({BOTH})", f"not values and ({BOTH})"),
    ("boolean", "not values", "values"),
    ("boolean", BOTH, BOTH.replace("and", "or")),
    ("comparison", "len(values) > LIMIT", "len(values) >= LIMIT"),
    ("comparison", "most is not None", "most is None"),
    ("removed statement", "raise ValueError(f'more than {LIMIT + 1}')", "pass"),
    ("return value", "return sum(values) / most", "return None"),
    ("arithmetic", "sum(values) / most", "sum(values) * most"),
}  # fmt: skip


def test_every_kind_of_change_is_listed_and_lines_of_logs_are_left_alone() -> None:
    assert {(site.kind, site.before, site.after) for site in sites_of(SOURCE)} == CHANGES


@pytest.mark.parametrize("module", [*MODULES][-2:])
def test_each_mutant_differs_from_its_module_in_one_place(module: str) -> None:
    source = (ROOT / module).read_text(encoding="utf-8")
    unchanged = ast.unparse(ast.parse(source)).splitlines()
    for number, site in enumerate(sites_of(source)):
        changed = mutant(source, number)
        compile(changed, module, "exec")
        lines = changed.splitlines()
        assert lines != unchanged, site
        if len(lines) == len(unchanged):
            assert sum(a != b for a, b in zip(lines, unchanged, strict=True)) == 1, site


@pytest.mark.parametrize("module", MODULES)
def test_the_default_tier_has_mirrored_tests_of_each_module(module: str) -> None:
    assert sites_of((ROOT / module).read_text(encoding="utf-8"))
    tests = mirrored_tests(module)
    assert set(MODULES[module]) <= set(tests)
    assert set(tests) & set(DEFAULT)


def test_a_seed_gives_the_same_mutants_and_fewer_are_the_first_of_more() -> None:
    module = "vllm_patching/server/state.py"
    source = (ROOT / module).read_text(encoding="utf-8")
    drawn = sample(module, source, 6, seed=1)
    assert drawn == sample(module, source, 6, seed=1)
    assert drawn[:2] == sample(module, source, 2, seed=1)
    assert drawn != sample(module, source, 6, seed=2)
    assert len(set(drawn)) == 6


def test_the_first_failure_is_named_and_a_tier_without_tests_kills_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    (tmp_path / "shares.py").write_text(SOURCE)
    (tmp_path / "test_shares.py").write_text(
        "import logging\nfrom shares import share\n"
        "def test_share(): assert share([1, 2], logging) == 2\n"
    )
    assert first_failure(tmp_path, ["test_shares.py"], "not nightly", 60) is None
    assert first_failure(tmp_path, ["test_shares.py"], "nightly", 60) is None
    [number] = [n for n, site in enumerate(sites_of(SOURCE)) if site.kind == "arithmetic"]
    (tmp_path / "shares.py").write_text(mutant(SOURCE, number))
    failed = first_failure(tmp_path, ["test_shares.py"], "not nightly", 60)
    assert failed == "test_shares.py::test_share"
    assert first_failure(tmp_path, ["test_none.py"], "not nightly", 60).startswith(  # type: ignore[union-attr]
        "pytest (status 4"
    )
