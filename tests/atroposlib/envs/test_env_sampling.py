"""Sampling parameters of sequences whose environment does not set them itself."""

import asyncio
import pickle
from typing import Any

import pytest

from atroposlib.envs.runner.items import (
    say_that_experts_are_left_out,
    say_that_sampling_differs,
)
from atroposlib.inference.client import APIServerConfig, VLLMServer
from atroposlib.inference.generation import (
    Generation,
    SampledRecord,
    SamplingSpan,
    VersionRecord,
    Weights,
    current_versions,
    sampling_of,
    say_that_it_may_be_constrained,
)
from tests.atroposlib.envs.scripted_env import ScriptedEnv, response


def run(env: ScriptedEnv) -> None:
    async def whole() -> None:
        await env.handle_send_to_api(await env._runner.rollouts.roll_out("item"), "item")

    asyncio.run(whole())


def test_what_is_neutral_is_left_out_of_the_parameters() -> None:
    neutral = {
        "top_p": 1,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    assert (
        sampling_of({**neutral, "temperature": 0.6, "seed": 3, "stop": None}, 2)
        == [{"temperature": 0.6}] * 2
    )
    changed = {"top_p": 0.9, "top_k": 20, "frequency_penalty": 0.1}
    assert sampling_of({**changed, "temperature": None}, 1, temperature=1.0) == [
        {"temperature": 1.0, **changed}
    ]
    assert sampling_of(changed, 1) is None, "a server's own default is not known"


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "[0-9]+"},
        {"json_schema": "{}"},
        {"logit_bias": {"5": 1.0}},
        {"allowed_token_ids": [0]},
        {"bad_words": ["no"]},
        {"structured_outputs": {"choice": ["a"]}},
        {"best_of": 0},
        {"of_a_server_that_nobody_here_knows": 0.5},
    ],
)
def test_what_may_have_changed_the_distribution_is_told_as_such(
    asked: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    say_that_it_may_be_constrained.cache_clear()
    for _ in range(2):
        assert sampling_of({"temperature": 1.0, **asked}, 1) == [
            {"temperature": 1.0, "constrained": 1}
        ]
    (record,) = caplog.records
    assert next(iter(asked)) in record.getMessage()
    assert "--allow-truncated-sampling" in record.getMessage()


def test_what_is_harmless_says_nothing() -> None:
    harmless = {
        "stop": ["x"],
        "seed": 3,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 5,
        "n": 2,
        "split": "train",
    }
    nothing = {
        "regex": None,
        "logit_bias": {},
        "bad_words": [],
        "json_schema": "",
        "of_another_server": False,
    }
    assert sampling_of({"temperature": 1.0, **harmless, **nothing}, 1) == [{"temperature": 1.0}]
    of_sglang = {"temperature": 1.0, "min_new_tokens": 8, "max_new_tokens": 32}
    assert sampling_of(of_sglang, 1) == [{"temperature": 1.0, "min_tokens": 8, "max_tokens": 32}]


@pytest.mark.parametrize(
    ("temperatures", "masks", "told"),
    [
        ((0.7, 0.7), [-100, -100, 2, 3], [{"temperature": 0.7, "max_tokens": 4}] * 2),
        (
            (0.7, 0.2),
            [-100, -100, 2, 3],
            [{"temperature": 0.7, "max_tokens": 4}, {"temperature": 0.2, "max_tokens": 4}],
        ),
        ((0.7, 0.7), [-100, 1, 2, 3], [{"temperature": 0.7, "max_tokens": 4}] * 2),
        ((0.7, 0.2), [-100, 1, 2, 3], None),
        ((0.7, None), [-100, 1, 2, 3], None),
    ],
    ids=[
        "all alike",
        "each its own",
        "turns alike",
        "an earlier turn may be of either",
        "one is not known",
    ],
)
def test_how_sequences_were_sampled_is_known_again_by_their_tokens(
    temperatures: tuple[float | None, ...],
    masks: list[int],
    told: list[Any] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answers of an environment that carries nothing along.

    A mask that trains on the prompt is that of a later turn.
    """

    say_that_sampling_differs.cache_clear()

    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            record, number = current_versions.get(), 2 - len(self.script)
            assert record is not None
            asked = {"temperature": temperatures[number], "max_tokens": 4, "top_p": 1.0}
            generation = Generation(
                [0, 1], [[2, 3 + number]], [[-0.5, -0.5]], [["stop", "length"][number]]
            )
            generation.sampling = sampling_of(asked, 1)
            record.note_generation(generation)
            return await super().collect_trajectory(item)

    script = [
        response(float(n), tokens=[0, 1, 2, 3 + n], masks=[*masks[:3], 3 + n]) for n in range(2)
    ]
    env = Meets([*script])
    run(env)
    assert env.posted[0].get("sampling_params") == told
    assert ("different parameters" in caplog.text) == (told is None and None not in temperatures)
    assert env.posted[0]["finish_reasons"] == ["stop", "length"]
    own = Meets([entry | {"sampling_params": {"temperature": 0.9}} for entry in script])
    run(own)
    assert own.posted[0]["sampling_params"] == [{"temperature": 0.9}] * 2, (
        "what the environment says itself stands"
    )
    cut = Meets(
        [entry | {"tokens": entry["tokens"][:3], "masks": entry["masks"][:3]} for entry in script]
    )
    run(cut)
    assert "finish_reasons" not in cut.posted[0], "these are not the tokens that were sampled"
    half = Meets([script[0], script[1] | {"tokens": [5, 6, 7], "masks": [-100, 6, 7]}])
    run(half)
    assert half.posted[0]["finish_reasons"] == ["stop", None], (
        "of one it is not known, of the other it is"
    )
    assert half.posted[0].get("sampling_params") == (None if told is None else [told[0], None])


def record_of(*requests: tuple[list[int], list[int], float]) -> VersionRecord:
    """Return the samples of a rollout: (prompt, output, temperature) of each request."""
    record = VersionRecord()
    for prompt, output, temperature in requests:
        sampling = sampling_of({"temperature": temperature}, 1)
        record.note_generation(
            Generation(prompt, [output], [[-0.5] * len(output)], ["stop"], sampling=sampling)
        )
    return record


def test_what_a_judge_was_asked_says_nothing_of_the_sequences_that_it_judged() -> None:
    """They came from elsewhere, as from the OpenAI routes, whose tokens are unknown."""
    rows, masks = [[1, 2, 3, 4]], [[-100, -100, 3, 4]]
    judged = record_of(([9, 1, 2, 3, 4], [7], 0.0), ([2, 3, 4], [7], 0.3))
    assert judged.sampled is not None
    assert judged.sampled.fields_of(rows, masks) == {}
    both = record_of(([1, 2], [3, 4], 0.7), ([9, 1, 2, 3, 4], [7], 0.0))
    assert both.sampled is not None
    assert both.sampled.fields_of(rows, masks) == {
        "sampling_params": [{"temperature": 0.7}],
        "finish_reasons": ["stop"],
    }
    cut = both.sampled.fields_of([[1, 2, 3], [1, 5, 6]], [[-100, -100, 3], [-100, 5, 6]])
    assert cut == {"sampling_params": [{"temperature": 0.7}, None]}, (
        "an answer to the prompt that was cut off afterwards"
    )


def test_a_group_by_hand_without_its_experts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            generation = Generation([0, 1], [[2, 3]], [[-0.5, -0.5]], ["stop"])
            generation.routed_experts = ["1x1x1:AAAA"]
            record = current_versions.get()
            assert record is not None
            record.note_generation(generation)
            return await super().collect_trajectory(item)

    say_that_experts_are_left_out.cache_clear()
    script = [response(float(n), tokens=[0, 1, 2, 3], masks=[-100, -100, 2, 3]) for n in range(2)]
    env = Meets([entry | {"routed_experts": "1x1x1:AAAA"} for entry in script])
    run(env)
    assert env.posted[0]["routed_experts"] == ["1x1x1:AAAA"] * 2
    assert "routed_experts" not in caplog.text
    run(Meets(script))
    assert "a group is posted without routed_experts" in caplog.text
    assert "give them sequence_fields(nodes)" in caplog.text


def test_requests_of_an_evaluation_are_not_noted() -> None:
    class Answers(VLLMServer):
        async def _generate_wrapper(self, **kwargs: Any) -> Generation:
            return Generation(
                [1], [[2]], [[-0.5]], ["stop"], weight_versions=[4], sampling=[{"temperature": 0.0}]
            )

    async def ask() -> VersionRecord:
        server, record = (
            Answers(APIServerConfig(base_url="http://x", model_name="m")),
            VersionRecord(),
        )
        current_versions.set(record)
        await server.generate(input_ids=[1], split="eval")
        assert record.sampled is not None
        assert (record.sampled.sequences, record.oldest_weights) == ([], Weights(0, 4))
        await server.generate(input_ids=[1])
        return record

    sampled = asyncio.run(ask()).sampled
    assert sampled is not None
    assert len(sampled.sequences) == 1


def test_a_record_does_not_grow_with_the_conversation() -> None:
    """Each of many turns has all before it in its prompt; a proxy reports the same sequences again
    each time.
    """
    conversation = list(range(100))
    turns = [(conversation * turn, [7] * 100, 0.5) for turn in range(1, 51)]
    record = record_of(*turns)
    assert len(pickle.dumps(record)) < 50 * 400, "tokens are not kept"
    again = SampledRecord()
    for _ in range(3):
        again.note([], [conversation], [[SamplingSpan({"temperature": 0.5}, 100)]], ["stop"])
    assert len(again.sequences) == 1
    assert again.fields_of([conversation], [conversation]) == {
        "sampling_params": [{"temperature": 0.5}],
        "finish_reasons": ["stop"],
    }


def test_what_are_no_token_ids_is_left_to_the_checks_of_the_group() -> None:
    sampled = record_of(([1, 2], [3, 4], 0.7)).sampled
    assert sampled is not None
    assert sampled.fields_of([[1, 2, "3", None]], [[-100, -100, 3, 4]]) == {}  # type: ignore[list-item]
