"""A teacher's logprobs from a group into a batch: found by token id, missing where it is not there,
refused by index.
"""

import gc
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.batch.groups import GroupError, teacher_logprobs
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError

TOKENS = np.array([5, 7, 9, 7], dtype=np.int64)
POSITIONS = np.array([1, 2, 3], dtype=np.int64)


def group(ids: object, logprobs: object) -> dict[str, object]:
    """Two sequences; the test needs the second one."""
    return {
        "tokens": [[1], TOKENS.tolist()],
        "distill_token_ids": [[[1]], ids],
        "distill_logprobs": [[[0.0]], logprobs],
    }


def read(ids: object, logprobs: object) -> np.ndarray | None:
    return teacher_logprobs(group(ids, logprobs), 1, TOKENS, POSITIONS)


def test_the_sampled_token_is_found_wherever_it_stands_among_the_ids() -> None:
    found = read([[], [7], [3, 9, 4], [8, 2]], [[], [-0.5], [-4.0, -1.25, -3.0], [-0.1, -0.2]])
    assert found is not None
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([-0.5, -1.25, np.nan], dtype=np.float32))


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=4, max_size=4),
    st.randoms(),
)
def test_what_is_read_is_the_entry_of_the_token(ids: list[list[int]], random: object) -> None:
    logprobs = [[-random.random() for _ in row] for row in ids]  # type: ignore[attr-defined]
    found = read(*json.loads(json.dumps([ids, logprobs])))
    assert found is not None
    for value, position in zip(found, POSITIONS, strict=True):
        table = dict(zip(ids[position], logprobs[position], strict=True))
        assert value == np.float32(table.get(int(TOKENS[position]), math.nan)) or (
            math.isnan(value) and int(TOKENS[position]) not in table
        )


def statements(tokens: int) -> int:
    """Lines of Python that reading so many trained tokens takes."""
    row = np.arange(tokens, dtype=np.int64)
    whole = {
        "tokens": [row.tolist()],
        "distill_token_ids": [[[t] for t in row.tolist()]],
        "distill_logprobs": [[[-1]] * tokens],
    }
    seen = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal seen
        seen += event == "line"
        return count

    before = sys.gettrace()
    gc.disable()  # hypothesis has statements of its own run whenever something is collected
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        found = teacher_logprobs(whole, 0, row, row[1:])
    finally:
        sys.settrace(before)
        gc.enable()
    assert found is not None
    assert found.tolist() == [-1.0] * (tokens - 1)
    assert found.dtype == np.float32
    return seen


def test_what_the_sdk_sends_is_read_without_a_statement_for_each_token() -> None:
    assert 0 < statements(20) == statements(400)


def test_without_a_teacher_there_is_nothing() -> None:
    bare = {"tokens": [TOKENS.tolist()]}
    assert teacher_logprobs(bare, 0, TOKENS, POSITIONS) is None
    empty = {**bare, "distill_token_ids": None, "distill_logprobs": None}
    assert teacher_logprobs(empty, 0, TOKENS, POSITIONS) is None


ONE = [[], [7], [9], [7]]
GOOD = [[], [-1.0], [-1.0], [-1.0]]


@pytest.mark.parametrize(
    ("ids", "logprobs", "named"),
    [
        (ONE[:3], GOOD, "distill_token_ids[1] has 3 entries, tokens[1] has 4"),
        (ONE, GOOD[1:], "distill_logprobs[1] has 3 entries, tokens[1] has 4"),
        (ONE, None, "distill_logprobs[1] has no entries, tokens[1] has 4"),
        (
            ONE,
            [[], [-1.0], [], [-1.0]],
            "distill_logprobs[1][2] has 0 entries, distill_token_ids[1][2] has 1",
        ),
        (ONE, [[], [-1.0], -1.0, [-1.0]], "distill_logprobs[1][2] is no list"),
        (
            ONE,
            [[], [-1.0], [-1.0], [1.0]],
            "distill_logprobs[1][3] holds 1.0 for token 7, which is no logprob",
        ),
        (ONE, [[], [-1.0], [math.nan], [-1.0]], "distill_logprobs[1][2] holds nan for token 9"),
        (ONE, [[], [-math.inf], [-1.0], [-1.0]], "distill_logprobs[1][1] holds -inf for token 7"),
        (ONE, [[], [None], [-1.0], [-1.0]], "distill_logprobs[1][1] holds None for token 7"),
        (ONE, [[], [True], [-1.0], [-1.0]], "distill_logprobs[1][1] holds True for token 7"),
        (ONE, [[], ["-1"], [-1.0], [-1.0]], "distill_logprobs[1][1] holds '-1' for token 7"),
        (ONE, [[], [-1e39], [-1.0], [-1.0]], "distill_logprobs[1][1] holds -1e+39 for token 7"),
        (ONE, [[], [-(10**400)], [-1.0], [-1.0]], "distill_logprobs[1][1] holds -1000000"),
    ],
)
def test_what_does_not_line_up_is_refused_by_its_index(
    ids: object, logprobs: object, named: str
) -> None:
    with pytest.raises(GroupError) as error:
        read(ids, logprobs)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["distill_token_ids", "distill_logprobs"])
def test_one_field_without_the_other_is_refused(field: str) -> None:
    with pytest.raises(GroupError, match=rf"{field} has no entries, tokens has 2 sequences"):
        teacher_logprobs({**group(ONE, GOOD), field: None}, 1, TOKENS, POSITIONS)


def posted(ids: object, logprobs: object) -> dict[str, object]:
    """A group of two sequences of equal scores, with these scores of the teacher."""
    return {
        "tokens": [TOKENS.tolist()] * 2,
        "masks": [[-100, *TOKENS.tolist()[1:]]] * 2,
        "scores": [1.0, 1.0],
        "distill_token_ids": ids,
        "distill_logprobs": logprobs,
    }


def test_a_batch_carries_them_to_its_bins(caplog: pytest.LogCaptureFixture) -> None:
    reader = BatchReader(
        TrainerConfig(model_name="m", distill_coef=0.5), vocab_size=16, tokens_per_bin=64
    )
    for _ in range(2):
        packed = reader.read(
            [posted([ONE, [[], [7], [3], [7]]], [GOOD, GOOD]), posted(None, None)], 0
        )
        (minibatch,) = packed.minibatches
        found = np.concatenate([bin["teacher_logprobs"].numpy() for bin in minibatch[0]])
        assert np.isfinite(found).sum() == 5, (
            "equal scores are forwarded, too: a teacher has to say something of them"
        )
        assert len(found) == 12
    assert (
        caplog.text.count("58.3% of the trained tokens of a batch have no teacher's logprob") == 1
    )


def test_a_student_of_another_temperature_than_the_teachers_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group, note = (
        posted([ONE, ONE], [GOOD, GOOD]),
        "sequences were sampled at another temperature than 1, such as",
    )
    reader = BatchReader(
        TrainerConfig(model_name="m", distill_coef=0.5), vocab_size=16, tokens_per_bin=64
    )
    reader.read([group, posted(None, None) | {"sampling_params": [{"temperature": 0.5}] * 2}], 0)
    assert note not in caplog.text, "no teacher scored what was sampled at 0.5"
    for _ in range(2):
        reader.read([group | {"sampling_params": [{"temperature": 1}, {"temperature": 0.7}]}], 0)
    assert caplog.text.count(f"1 of 2 {note} 0.7: ") == 1
    hot = TrainerConfig(model_name="m", distill_coef=0.5, temperature=1.5)
    BatchReader(hot, vocab_size=16, tokens_per_bin=64).read([group], 0)
    assert f"2 of 2 {note} 1.5: " in caplog.text


def test_a_batch_that_no_teacher_scored_is_refused_where_one_is_to_be_learned_from() -> None:
    bare = [posted(None, None)]
    with pytest.raises(
        BatchError, match=r"none of the 6 trained tokens of this batch has a teacher's logprob"
    ):
        BatchReader(
            TrainerConfig(model_name="m", distill_coef=0.5), vocab_size=16, tokens_per_bin=64
        ).read(bare, 0)
    assert (
        BatchReader(TrainerConfig(model_name="m"), vocab_size=16, tokens_per_bin=64)
        .read(bare, 0)
        .minibatches
    )
