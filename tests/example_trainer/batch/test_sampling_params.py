"""From which distribution a sequence was sampled: what is read, what is refused in one line, and
what is noted once.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from example_trainer.batch.groups import GroupError, SamplerLogprobs, SamplingRules, sampling_of
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError
from tests.example_trainer.batch.test_groups import VOCAB, make_group

RAW = SamplerLogprobs(raw=("http://one:9001",))


def test_what_one_request_says_is_of_all_its_tokens() -> None:
    found = sampling_of(
        {"temperature": 0.5, "max_tokens": 9, "top_p": 1, "top_k": -1, "n": 4},
        0,
        3,
        SamplingRules(),
    )
    assert found.temperatures is not None
    assert found.temperatures.tolist() == [0.5] * 3
    assert (found.max_tokens, found.narrowed) == (9, ())
    assert sampling_of(None, 0, 3, SamplingRules()).temperatures is None


def test_turns_say_what_each_of_their_tokens_was_sampled_at() -> None:
    turns = [
        {"temperature": 1, "tokens": 1},
        {"temperature": 0.25, "tokens": 2, "max_tokens": 5, "min_p": 0.125},
    ]
    found = sampling_of(turns, 0, 3, SamplingRules(allow_narrowed=True))
    assert found.temperatures is not None
    assert found.temperatures.tolist() == [1.0, 0.25, 0.25]
    assert (found.max_tokens, found.narrowed) == (5, ("min_p 0.125",))
    silent = sampling_of([{"tokens": 1}, {"temperature": 0.25, "tokens": 2}], 0, 3, SamplingRules())
    assert silent.temperatures is None, "of some of its tokens it is not known"


def test_parts_of_one_temperature_need_not_add_up() -> None:
    """A rollout of two turns that is trained on its last answer: which tokens are missing does not
    matter then.
    """
    turns = [
        {"temperature": 0.5, "tokens": 7, "max_tokens": 9},
        {"temperature": 0.5, "tokens": 3, "max_tokens": 5},
    ]
    found = sampling_of(turns, 0, 3, SamplingRules())
    assert found.temperatures is not None
    assert found.temperatures.tolist() == [0.5] * 3
    assert found.max_tokens == 5
    assert (
        sampling_of([{"temperature": 0.01, "tokens": 2}], 0, 3, SamplingRules()).temperatures
        is not None
    )


@pytest.mark.parametrize(
    ("entry", "rules", "message"),
    [
        (
            {"temperature": 0},
            SamplingRules(),
            "sequence 2 was sampled at temperature 0, greedily, which is not a distribution",
        ),
        ({"temperature": -1.0}, SamplingRules(), "at temperature -1, which is not a distribution"),
        (
            {"temperature": math.inf},
            SamplingRules(),
            "at temperature inf, which is not a distribution",
        ),
        (
            {"temperature": math.nan},
            SamplingRules(),
            "at temperature nan, which is not a distribution",
        ),
        (
            [{"temperature": 1, "tokens": 2}, {"temperature": 0, "tokens": 1}],
            SamplingRules(),
            "temperature 0, greedily",
        ),
        (
            {"temperature": 1, "top_p": 0.9, "top_k": 40},
            SamplingRules(),
            "top_k 40, top_p 0.9, .*--allow-truncated-sampling",
        ),
        ({"temperature": 1, "min_p": 0.1}, SamplingRules(), "min_p 0.1"),
        ({"temperature": 1, "presence_penalty": -0.5}, SamplingRules(), "presence_penalty -0.5"),
        ({"temperature": 1, "frequency_penalty": 0.5}, SamplingRules(), "frequency_penalty 0.5"),
        ({"temperature": 1, "repetition_penalty": 1.1}, SamplingRules(), "repetition_penalty 1.1"),
        ({"temperature": 1, "min_tokens": 8}, SamplingRules(), "min_tokens 8"),
        (
            {"temperature": 1, "constrained": 2},
            SamplingRules(),
            "constrained 2, .*--allow-truncated-sampling",
        ),
        (
            {"temperature": 0.6},
            SamplingRules(deterministic=True),
            "--deterministic computes at 1 alone",
        ),
        (
            {"temperature": 0.6},
            SamplingRules(servers=RAW),
            "http://one:9001 .*--logprobs-mode processed_logprobs",
        ),
        (
            {"temperature": "warm"},
            SamplingRules(),
            r"sampling_params\[2\] has temperature 'warm', which is not a finite number",
        ),
        (
            {"temperature": 1, "top_p": math.nan},
            SamplingRules(),
            "top_p nan, which is not a finite number",
        ),
        ("hot", SamplingRules(), r"sampling_params\[2\] is not an object of numbers"),
        ([], SamplingRules(), "is not an object of numbers"),
        (
            {"temperature": 1e-46},
            SamplingRules(),
            "temperature 1e-46, greedily, .* of at least 0.01",
        ),
        ({"temperature": 0.0099}, SamplingRules(), "temperature 0.0099, greedily"),
        (
            {"temperature": 1e39},
            SamplingRules(),
            r"at temperature 1e\+39, which is not a distribution",
        ),
        (
            [{"temperature": 1, "tokens": 2}, {"temperature": 0.5, "tokens": 2}],
            SamplingRules(),
            r"has parts of \[2, 2\] tokens, at different temperatures, and the mask leaves 3 .*masked turns",
        ),
        (
            [{"tokens": 2}, {"temperature": 0.5, "tokens": 2}],
            SamplingRules(),
            r"has parts of \[2, 2\] tokens",
        ),
        (
            [{"temperature": 1, "tokens": -1}],
            SamplingRules(),
            r"has parts of \[-1\] tokens, but none",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_line(
    entry: Any, rules: SamplingRules, message: str
) -> None:
    with pytest.raises(GroupError, match=message) as caught:
        sampling_of(entry, 2, 3, rules)
    assert "\n" not in str(caught.value)


def reader(**options: Any) -> BatchReader:
    return BatchReader(TrainerConfig(model_name="m", **options), VOCAB, tokens_per_bin=64)


def at(*temperatures: float | None, **more: float) -> dict[str, Any]:
    return make_group(
        sampling_params=[None if t is None else {"temperature": t, **more} for t in temperatures]
    )


def test_old_rollouts_train_at_the_options_temperature_with_one_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = reader(temperature=0.5)
    for groups in ([make_group()], [at(0.75, None), make_group()], [at(1, 1)]):
        packed = made.read(groups, 0)  # what is noted is noted of the first
    assert [r.getMessage() for r in caplog.records] == [
        "2 of 2 sequences do not record at which temperature they were sampled; such are taken to be of --temperature 0.5"
    ]
    (((other,),),) = packed.minibatches
    (((one,),),) = made.read([at(0.75, None)], 0).minibatches
    assert sorted(one["temperatures"].tolist()) == [0.5] * 3 + [0.75] * 2
    assert other["temperatures"].tolist() == [1.0] * 5


def test_placeholders_in_the_place_of_logprobs_are_unknown_with_one_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = reader()
    for _ in range(2):
        (minibatch,) = made.read(
            [at(1, 1) | {"inference_logprobs": [[1.0] * 4, [1.0, 1.0, -1.5, 1.0, -2.0]]}], 0
        ).minibatches
        assert sum(int(bin["rollout_logprobs"].isnan().sum()) for bin in minibatch[0]) == 3
    assert (
        caplog.text.count(
            "inference_logprobs above 0 at 3 sampled tokens of a batch are placeholders, no logprobs"
        )
        == 1
    )


def test_processed_logprobs_of_a_temperature_that_nobody_said_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = reader()
    made.use_server_modes(SamplerLogprobs(processed=("http://two:9001",)))
    made.read([at(0.5, 0.5)], 0)
    assert not caplog.records
    for _ in range(2):
        made.read([make_group()], 0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 of 2 sequences do not record at which temperature they were sampled; such are taken to be of --temperature 1. The "
        "logprobs of http://two:9001 are those at the temperature that it sampled at: unless that is the same, every ratio is "
        "wrong. Give that temperature as --temperature, or let the environment send sampling_params"
    )


def test_masking_by_finish_reasons_that_nobody_says_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = reader(truncated_answers="mask")
    made.read([at(1, 1) | {"finish_reasons": ["length", "stop"]}], 0)
    assert not caplog.records
    for _ in range(2):
        packed = made.read([at(1, 1)], 0)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "2 of 2 sequences do not record why their sampling ended, so --truncated-answers mask"
    )
    assert packed.batch.trained_tokens == 5


def test_truncated_sampling_is_allowed_with_the_bias_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = reader(allow_truncated_sampling=True)
    for _ in range(2):
        made.read([at(1, 1, top_p=0.9)], 0)
    (record,) = caplog.records
    assert (
        "top_p 0.9 (--allow-truncated-sampling) is biased: the server's logprobs are of"
        in record.getMessage()
    )


def test_a_batch_of_greedy_answers_is_refused_with_its_reason() -> None:
    with pytest.raises(BatchError, match=r"holds nothing to train on: group 0: .*temperature 0"):
        reader().read([at(1, 0)], 0)


def test_what_servers_say_of_their_logprobs_is_heeded(caplog: pytest.LogCaptureFixture) -> None:
    made = reader()
    made.read([at(0.5, 0.5)], 0)
    assert not caplog.records
    made.use_server_modes(SamplerLogprobs(unknown=("http://two:9001",)))
    for _ in range(2):
        made.read([at(1, 1)], 0)
        made.read([at(0.5, 0.5)], 0)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "http://two:9001 cannot be asked which logprobs it hands out; they are taken to be of temperature 0.5"
    )
    made.use_server_modes(RAW)
    made.read([at(1, 1)], 0)
    with pytest.raises(BatchError, match="http://one:9001"):
        made.read([at(0.5, 0.5)], 0)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (
            {"seq_len": 3, "too_long": "drop"},
            {},
            r"2 sequences are longer than --seq-len 3 \(--too-long drop\)",
        ),
        (
            {"truncated_answers": "mask"},
            {"finish_reasons": ["length"] * 2},
            "every answer ran into its limit",
        ),
        ({}, {"masks": [[-100] * 4, [-100] * 5]}, "every token is masked with -100"),
    ],
)
def test_a_batch_of_which_nothing_is_left_says_why(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        reader(**options).read([make_group(**changes)], 0)


def test_what_teaches_nothing_is_forwarded_where_something_needs_it() -> None:
    """One of two groups teaches nothing: 5 of its 10 tokens are forwarded, or all."""
    groups = [make_group(scores=[1.0, 1.0]), make_group()]
    for options, targets in (
        ({}, 5),
        ({"entropy_coef": 0.1}, 10),
        ({"forward_zero_advantages": True}, 10),
    ):
        packed = reader(**options).read(groups, 0)
        assert packed.figures(0).forwarded_targets == targets
        assert packed.figures(0).tokens == 10
    exact = {"deterministic": True, "weight_bridge_mode": "shared_vllm"}
    for needing in ({"kl_coef": 0.1}, {"distill_coef": 0.1}, {"loss": "somebody:loss"}, exact):
        assert TrainerConfig.model_validate({"model_name": "m", **needing}).forwards_zero_advantages
    with pytest.raises(
        ValueError, match=r"--no-forward-zero-advantages would leave out .* with --kl-coef"
    ):
        TrainerConfig(model_name="m", kl_coef=0.1, forward_zero_advantages=False)
