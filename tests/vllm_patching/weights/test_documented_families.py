"""The page of tiers has the tables of architectures."""

from __future__ import annotations

from tests.vllm_patching.weights.documented_families import (
    END_OF_TRIED,
    TRIED,
    families_table,
    tried_table,
    written_table,
)

REMEDY = (
    "paste the output of `python -m tests.vllm_patching.weights.documented_families` between the "
    "markers in docs/models.md"
)


def test_the_page_has_the_table_of_tiers() -> None:
    assert written_table() == families_table(), REMEDY


def test_the_page_has_the_table_of_architectures_that_tests_try() -> None:
    assert written_table(TRIED, END_OF_TRIED) == tried_table(), REMEDY
