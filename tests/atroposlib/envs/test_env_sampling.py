"""How sequences were sampled, where the environment does not say it itself."""

import asyncio
from typing import Any

import pytest
from scripted_env import ScriptedEnv, response

from atroposlib.envs.rollouts import say_that_sampling_differs
from atroposlib.envs.server_handling.generation import Generation, current_versions
from atroposlib.envs.server_handling.sampling import sampling_of


def run(env: ScriptedEnv) -> None:
    async def whole() -> None:
        await env.handle_send_to_api(await env.roll_out("item"), "item")

    asyncio.run(whole())


def test_what_is_neutral_is_left_out_of_the_parameters() -> None:
    neutral = {"top_p": 1, "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0}
    assert sampling_of({**neutral, "temperature": 0.6, "seed": 3, "stop": None}, 2) == [{"temperature": 0.6}] * 2
    changed = {"top_p": 0.9, "top_k": 20, "frequency_penalty": 0.1}
    assert sampling_of({**changed, "temperature": None}, 1, temperature=1.0) == [{"temperature": 1.0, **changed}]
    assert sampling_of(changed, 1) is None, "a server's own default is not known"


@pytest.mark.parametrize(
    ("temperatures", "masks", "told"),
    [
        ((0.7, 0.7), [-100, -100, 2, 3], [{"temperature": 0.7, "max_tokens": 4}] * 2),
        ((0.7, 0.2), [-100, -100, 2, 3], [{"temperature": 0.7, "max_tokens": 4}, {"temperature": 0.2, "max_tokens": 4}]),
        ((0.7, 0.7), [-100, 1, 2, 3], [{"temperature": 0.7, "max_tokens": 4}] * 2),
        ((0.7, 0.2), [-100, 1, 2, 3], None),
        ((0.7, None), [-100, 1, 2, 3], None),
    ],
    ids=["all alike", "each its own", "turns alike", "an earlier turn may be of either", "one is not known"],
)
def test_how_sequences_were_sampled_is_known_again_by_their_tokens(
    temperatures: tuple[float | None, ...], masks: list[int], told: list[Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an environment that carries nothing along. A mask that trains on the prompt is that of a later turn."""

    say_that_sampling_differs.cache_clear()

    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            record, number = current_versions.get(), 2 - len(self.script)
            assert record is not None
            asked = {"temperature": temperatures[number], "max_tokens": 4, "top_p": 1.0}
            generation = Generation([0, 1], [[2, 3 + number]], [[-0.5, -0.5]], [["stop", "length"][number]])
            generation.sampling = sampling_of(asked, 1)
            record.note_generation(generation)
            return await super().collect_trajectory(item)

    script = [response(float(n), tokens=[0, 1, 2, 3 + n], masks=[*masks[:3], 3 + n]) for n in range(2)]
    env = Meets([*script])
    run(env)
    assert env.posted[0].get("sampling_params") == told
    assert ("different parameters" in caplog.text) == (told is None and None not in temperatures)
    assert env.posted[0]["finish_reasons"] == ["stop", "length"]
    own = Meets([entry | {"sampling_params": {"temperature": 0.9}} for entry in script])
    run(own)
    assert own.posted[0]["sampling_params"] == [{"temperature": 0.9}] * 2, "what the environment says itself stands"
    cut = Meets([entry | {"tokens": entry["tokens"][:3], "masks": entry["masks"][:3]} for entry in script])
    run(cut)
    assert "finish_reasons" not in cut.posted[0], "these are not the tokens that were sampled"
