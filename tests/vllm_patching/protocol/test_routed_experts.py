"""Experts of tokens on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.protocol.routed_experts import ExpertsError, from_wire, to_wire


@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    shape = (
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
    )
    most = data.draw(st.sampled_from([0, 255, 256, 65535]))
    seed = data.draw(st.integers(0, 9))
    experts = np.random.default_rng(seed).integers(0, most, shape, endpoint=True)
    word = to_wire(experts.astype(data.draw(st.sampled_from([np.int64, np.uint16]))))
    assert np.array_equal(from_wire(word), experts)
    assert word.split(":")[0].endswith("x2") == bool(experts.size and experts.max() > 255)


@pytest.mark.parametrize(
    "word",
    ["", "2x2x1", "2x2x3:AAAA", "0x2x1:AAAA", "2x2x1:AA==A", "2x2x1:AAAA", "x:", None, 3, ["a"]],
)
def test_another_word_is_refused(word: object) -> None:
    with pytest.raises(ExpertsError):
        from_wire(word)


@pytest.mark.parametrize("experts", [np.zeros((2, 2)), np.full((1, 1, 1), -1)])
def test_what_is_no_experts_is_not_written(experts: np.ndarray) -> None:
    with pytest.raises(ExpertsError, match="numbers from 0 to 65535"):
        to_wire(experts)
