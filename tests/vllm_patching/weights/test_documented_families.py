"""The page of tiers has the table of families."""

from __future__ import annotations

from tests.vllm_patching.weights.documented_families import families_table, written_table


def test_the_page_has_the_table() -> None:
    assert written_table() == families_table(), (
        "paste the output of `python -m tests.vllm_patching.weights.documented_families` between "
        "the markers in docs/models.md"
    )
