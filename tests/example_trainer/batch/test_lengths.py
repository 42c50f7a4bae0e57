"""The penalty of a long answer: DAPO's, as its equation has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from example_trainer.batch.lengths import LengthRules


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 250), st.floats(0.1, 4.0))
def test_the_penalty_is_the_papers(tokens: int, limit: int, buffer: int, most: float) -> None:
    found = LengthRules("penalise", buffer, most).penalty(tokens, limit)
    if tokens <= limit - buffer:
        assert found == 0
    elif tokens <= limit:
        assert abs(found - most * ((limit - buffer) - tokens) / buffer) < 1e-12
    else:
        assert found == -most
    assert LengthRules("train", buffer, most).penalty(tokens, limit) == 0
