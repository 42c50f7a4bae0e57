"""generate_cost.py, as far as it goes without a server."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from bench import generate_cost
from vllm_patching.server.generate import GenerateRequest


def test_lengths_are_geometric_under_a_cap() -> None:
    lengths = generate_cost.Lengths(450, 1024, seed=3)
    drawn = [lengths.draw() for _ in range(20_000)]
    assert 1 <= min(drawn) < 5
    assert max(drawn) == 1024
    stay = 1 - 1 / 450
    assert statistics.fmean(drawn) == pytest.approx(450 * (1 - stay**1024), rel=0.03)
    assert sum(length == 1024 for length in drawn) / len(drawn) == pytest.approx(
        stay**1023, rel=0.15
    )


@pytest.mark.parametrize(
    "form", [form for form, (path, _) in generate_cost.FORMS.items() if path == "/generate"]
)
def test_what_is_asked_is_understood(form: str) -> None:
    fields = generate_cost.FORMS[form][1]
    request = GenerateRequest(prompt="x", **fields)
    assert request.token_logprobs == (form == "numbers")


def test_the_table_has_a_row_for_each_way_and_room_for_what_failed(tmp_path: Path) -> None:
    way = {"tokens_per_second": 1234.5, "front_end_us_per_token": 9.5}
    text = generate_cost.report({"ways": {"numbers": way, "engine alone": {"failed": "no memory"}}})
    assert "1234.5" in text
    assert "engine alone" in text
    args = generate_cost.parse(["--output", str(tmp_path), "--tiny"])
    assert args.in_flight % generate_cost.GROUP == 0
