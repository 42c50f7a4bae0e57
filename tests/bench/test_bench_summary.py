"""The arithmetic behind the benchmarks' tables: spreads, halts, pairs of spells, a trainer's steps."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import generate_cost
from bench.colocate import longest, summary
from bench.gpu.shapes import (
    SHAPES,
    active_parameters,
    cache_gib,
    model_bytes,
    shard_shapes,
    tiny_of,
)
from bench.gpu.summary import (
    Pair,
    alternate,
    find_halts,
    percentile,
    spread_by_phase,
    spread_ms,
    summary_of_pairs,
)
from vllm_patching.server.generate import GenerateRequest


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.9, 1.0)] == [
        1.0,
        1.0,
        3.0,
        5.0,
        5.0,
    ]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_spread_is_in_milliseconds() -> None:
    assert spread_ms([0.001, 0.003, 0.002]) == {"median": 2.0, "p90": 3.0, "max": 3.0, "n": 3}
    assert spread_ms([]) == {"n": 0}
    assert list(spread_by_phase([{"pause": 0.1, "commit": 0.2}, {"pause": 0.3}])) == [
        "pause",
        "commit",
    ]


def test_an_update_is_found_in_the_stream_of_tokens() -> None:
    steady = [i * 0.01 for i in range(100)]
    halted = [t if t < 0.5 else t + 0.2 for t in steady]  # nothing arrives between 0.49 and 0.70
    halts = find_halts([steady, halted], [(0.5, 0.65)], after=0.0)
    assert halts.around_updates["max"] == pytest.approx(210, abs=0.1)
    assert halts.usual["max"] == pytest.approx(10, abs=0.1)
    assert halts.unseen == 0


def test_a_gap_after_an_update_belongs_to_it_but_not_to_two_updates() -> None:
    arrivals = [
        0.0,
        0.1,
        0.2,
        0.3,
        0.9,
        1.0,
        1.1,
    ]  # what was cached is computed again between 0.3 and 0.9
    assert find_halts([arrivals], [(0.1, 0.25)], after=0.2).around_updates["max"] == pytest.approx(
        600
    )
    far = find_halts([arrivals], [(0.1, 0.25), (1.05, 1.1)], after=0.0)
    assert (far.around_updates["n"], far.around_updates["max"]) == (2, pytest.approx(100))


def test_updates_that_nobody_saw_are_counted() -> None:
    halts = find_halts([[0.0, 0.1]], [(5.0, 5.1), (0.05, 0.06)], after=0.0)
    assert (halts.unseen, halts.around_updates["n"]) == (1, 1)


def test_shapes_are_the_published_ones() -> None:
    assert len(shard_shapes("qwen2.5-14b", 0, 2)) == 339
    assert model_bytes("qwen3-1.7b") == pytest.approx(3.44e9, rel=0.002)
    assert model_bytes("qwen2.5-14b") == pytest.approx(29.54e9, rel=0.001)
    halves = [
        sum(a * b[0] if b else a for a, *b in shard_shapes("qwen2.5-14b", rank, 2))
        for rank in (0, 1)
    ]
    assert halves[0] == halves[1]
    assert SHAPES["tiny"]["torch_dtype"] == "float32"


def test_a_mixture_counts_all_experts_for_memory_and_a_tokens_own_for_arithmetic() -> None:
    assert model_bytes("qwen3-30b-a3b") == 2 * 30_532_122_624
    embedding = 151936 * 2048
    assert round((active_parameters("qwen3-30b-a3b") + embedding) / 1e9, 2) == 3.35
    whole, part = (model_bytes(shape) for shape in ("qwen3-30b-a3b", "qwen3-30b-a3b-12l"))
    others = 2 * 2 * (2 * embedding + 2048)  # embedding, output matrix and norm, once more
    assert 4 * part - whole == pytest.approx(3 * others / 2, rel=1e-6)
    assert active_parameters("qwen3-1.7b") == pytest.approx(1.72e9, rel=0.001)
    assert [tiny_of(shape) for shape in ("qwen3-8b", "qwen3-30b-a3b-4l")] == [
        "tiny",
        "tiny-mixture",
    ]


def test_a_cache_has_room_for_the_tokens_of_each_rank() -> None:
    assert cache_gib("qwen3-0.6b", 1 << 18) == 28
    assert [cache_gib("qwen3-30b-a3b-24l", 1 << 18, tp) for tp in (1, 2, 4, 8)] == [12, 6, 3, 3]


class Machine:
    """Generates at a rate that changes from spell to spell, and loses a share of it to updates."""

    def __init__(self, rate: float, drift: float, lost: float) -> None:
        self.rate, self.drift, self.lost = rate, drift, lost
        self.spells: list[bool] = []

    def spell(self, updates: bool) -> float:
        self.spells.append(updates)
        rate = self.rate + self.drift * (len(self.spells) - 1)
        return rate * (1 - self.lost) if updates else rate


def test_which_of_a_pair_comes_first_changes() -> None:
    machine = Machine(100.0, 0.0, 0.0)
    alternate(machine.spell, 3)
    assert machine.spells == [False, True, True, False, False, True]


@given(
    rate=st.floats(1e3, 1e5),
    drift=st.floats(-0.02, 0.02),
    lost=st.floats(0.0, 0.9),
    half=st.integers(1, 5),
)
def test_a_steady_drift_does_not_change_the_ratio(
    rate: float, drift: float, lost: float, half: int
) -> None:
    found = summary_of_pairs(alternate(Machine(rate, drift * rate, lost).spell, 2 * half))
    assert found["ratio"] == pytest.approx(1 - lost, abs=2e-4)
    assert found["pairs"] == 2 * half == len(found["ratios"])


def test_means_and_ratios() -> None:
    found = summary_of_pairs([Pair(200.0, 100.0), Pair(100.0, 110.0)])
    assert found == {
        "pairs": 2, "tokens_per_s_without_updates": 150.0, "tokens_per_s": 105.0, "ratio": 0.7, "ratios": [0.5, 1.1]
    }  # fmt: skip


def test_a_machine_that_generates_nothing_has_no_ratio() -> None:
    assert summary_of_pairs([Pair(0.0, 0.0)])["ratio"] is None


def step(whole: float, **turn: float) -> dict[str, object]:
    return {"seconds": whole, "turn": turn, "peak_reserved_bytes": int(whole * 100)}


def test_the_first_step_is_left_out_and_turns_are_told_where_there_are_any() -> None:
    steps = [step(9.0, seconds=8.0, freed_bytes=4.0)] + [
        step(2.0, seconds=1.0, freed_bytes=4.0)
    ] * 2
    found = summary({"steps": steps, "tokens": 1000}, 1024)
    assert found == {
        "tokens": 1024, "steps": 2, "seconds": 2.0, "tokens_per_second": 500.0, "peak_reserved_bytes": 200,
        "turn_seconds": 1.0, "turn_freed_bytes": 4.0,
    }  # fmt: skip
    assert "turn_seconds" not in summary({"steps": [step(2.0)], "tokens": 1000}, 1024)


@given(room=st.integers(0, 5000), shortest=st.integers(1, 64), most=st.integers(64, 4096))
def test_the_longest_size_is_found_to_an_eighth(room: int, shortest: int, most: int) -> None:
    tried: list[int] = []

    def refusal(tokens: int) -> str | None:
        tried.append(tokens)
        return None if tokens <= room else f"room for {room}"

    found = longest(refusal, shortest, most)
    fits, refused = found["tokens"], [size for size in tried if size > room]
    assert fits == max((size for size in tried if size <= room), default=0)
    assert all(size % shortest == 0 and size <= most for size in tried)
    if refused:
        assert found["why"] == f"{min(refused)}: room for {room}"
        # Halved three times, what is not known is an eighth of the last size that fitted, or one
        # sequence.
        assert not fits or min(refused) - fits <= max(2 * shortest, fits / 4)
    else:
        assert 2 * fits > most
        assert found["why"] == f"--most {most}"


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
