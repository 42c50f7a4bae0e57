"""bench/colocate.py's summary of a trainer's steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.colocate import MODES, longest, parse, report, summary


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


def test_the_table_holds_what_was_measured() -> None:
    assert report({}) == "nothing was measured"
    turn = {"turn_seconds": 1.5, "turn_rest": 0.1, "turn_wake": 0.2, "turn_freed_bytes": 3 << 30}
    with_turns = {"tokens": 4096, "tokens_per_second": 777.0, "seconds": 2.0, **turn}
    text = report(
        {
            MODES[0]: {"at_the_longest": with_turns},
            MODES[1]: {"at_the_longest": {"failed": "no memory"}},
        }
    )
    assert all(figure in text for figure in ("4096", "777", "1.5", "0.1", "0.2", "3"))
    assert MODES[1] not in text


def test_tiny_ends_soon() -> None:
    args = parse(["--output", "x", "--tiny", "--device", "cpu"])
    assert (args.length, args.most, args.shape) == (64, 256, "tiny")


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
