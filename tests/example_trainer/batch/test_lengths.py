"""The penalty of a long answer: DAPO's, as its equation has it, and what it is where that has no
place for its buffer.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.batch.groups import LengthRules
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from tests.example_trainer.batch.test_groups import VOCAB, make_group


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 250), st.floats(0.1, 4.0))
def test_the_penalty_is_the_papers(tokens: int, limit: int, buffer: int, most: float) -> None:
    found = LengthRules("penalise", buffer, most).penalty(tokens, limit)
    buffer = min(buffer, limit)
    if tokens <= limit - buffer:
        assert found == 0
    elif tokens <= limit:
        assert abs(found - most * ((limit - buffer) - tokens) / buffer) < 1e-12
    else:
        assert found == -most
    assert LengthRules("train", buffer, most).penalty(tokens, limit) == 0


def test_an_empty_answer_is_never_penalised() -> None:
    rules = LengthRules("penalise", buffer=128, most=1.0)
    assert [rules.penalty(tokens, 64) for tokens in (0, 32, 64, 65)] == [0.0, -0.5, -1.0, -1.0]
    assert rules.penalty(1, 0) == -1.0


def group_of(limit: int, **more: object) -> dict[str, object]:
    return make_group(sampling_params=[{"temperature": 1, "max_tokens": limit}] * 2, **more)


def test_a_limit_below_the_buffer_and_advantages_without_penalty_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TrainerConfig(model_name="m", truncated_answers="penalise", overlong_buffer=16)
    reader = BatchReader(config, VOCAB, tokens_per_bin=64)
    reader.read([group_of(16)], 0)
    assert not caplog.records
    for _ in range(2):
        reader.read([group_of(12), group_of(9), group_of(16, advantages=[1.0, 2.0])], 0)
    assert [record.getMessage() for record in caplog.records] == [
        "Answers may be 9 tokens long, and --overlong-buffer is 16: they are penalised from their first token on; give a "
        "smaller buffer",
        "1 of a batch's groups bring advantages of their own, which --truncated-answers penalise leaves as they are",
    ]
    caplog.clear()
    BatchReader(TrainerConfig(model_name="m"), VOCAB, tokens_per_bin=64).read(
        [group_of(9, advantages=[1.0, 2.0])], 0
    )
    assert not caplog.records
