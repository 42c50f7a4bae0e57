"""The workers of an environment that serves: outages, broken items and the end of a run, without
any process.
"""

import asyncio
import re
import time
from typing import Any

import pytest

from atroposlib.envs.runner import items
from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, RolloutFailure
from atroposlib.inference import client
from atroposlib.inference.client import APIServerConfig, OpenAIServer
from atroposlib.inference.server_manager import ServerManager
from atroposlib.utils import waiting
from tests.atroposlib.envs.scripted_env import ScriptedEnv, response
from tests.rollout_standin import RolloutStandin
from tests.virtual_time import virtual_time

PAIR = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}


def serving_env(
    *statuses: dict[str, Any], kind: type[ScriptedEnv] = ScriptedEnv, **settings: Any
) -> Any:
    env = kind([], **({"max_num_workers": 2, "steps_per_eval": 0} | settings))
    env._runner.state.env_id, env._runner.trainer_steps = 0, 4
    env.config.batch_size = 8
    env._runner.connections.service = RolloutStandin(*statuses)
    return env


async def rounds(env: ScriptedEnv, most: int = 200) -> int:
    """Run the loop until it is over; the number of rounds, or -1 if it goes on."""
    try:
        for number in range(most):
            if await env._runner.one_round():
                return number
            await asyncio.sleep(0)
        return -1
    finally:
        await stop_workers(env)


async def stop_workers(env: ScriptedEnv) -> None:
    for task in env.workers:
        task.cancel()
    if env.workers:
        await asyncio.wait(env.workers)


def idle(env: ScriptedEnv) -> ScriptedEnv:
    """One that has no items."""

    async def nothing() -> None:
        return None

    env.get_next_item = nothing
    return env


# ---- the end
# -----------------------------------------------------------------------------------------------------------


async def test_the_last_batch_handed_out_is_not_the_end_of_the_run() -> None:
    """The trainer dies in the last step and resumes: the environment is there still, and leaves
    when the run has ended.
    """
    last, back = {"current_step": 4, "run_ended": False}, {"current_step": 2, "run_ended": False}
    env = idle(serving_env(last, last, last, back, back, last, last | {"run_ended": True}))
    assert await rounds(env) == 6


async def test_a_run_that_ended_early_ends_the_environment() -> None:
    assert (
        await rounds(
            idle(
                serving_env(
                    {"current_step": 1, "run_ended": False}, {"current_step": 1, "run_ended": True}
                )
            )
        )
        == 1
    )


async def test_a_service_that_does_not_tell_of_the_end_is_left_at_the_last_batch() -> None:
    assert await rounds(idle(serving_env({"current_step": 3}, {"current_step": 4}))) == 1


async def test_the_environments_own_limit_ends_it_whatever_the_run_does() -> None:
    env = idle(
        serving_env(
            {"current_step": 2, "run_ended": False},
            {"current_step": 3, "run_ended": False},
            total_steps=3,
        )
    )
    assert await rounds(env) == 1


async def test_a_trainer_that_does_more_steps_than_it_said_is_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was resumed with more steps: each of them begins the wait again."""
    now = [0.0]
    monkeypatch.setattr("atroposlib.envs.runner.runner.time.monotonic", lambda: now[0])
    env = idle(
        serving_env(
            *({"current_step": step, "run_ended": False} for step in range(3, 9)),
            service_timeout=10.0,
        )
    )
    for _ in range(6):
        assert not await env._runner.one_round()
        now[0] += 9.0
    assert not await env._runner.one_round()
    now[0] += 2.0
    assert await env._runner.one_round()


async def test_a_service_that_has_begun_another_run_ends_it_once_every_batch_was_handed_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run ended, and the service was restarted before this environment asked again."""
    caplog.set_level("INFO")
    env = idle(
        serving_env({"current_step": 4, "run_ended": False}, {"status": "not registered here"})
    )
    assert await rounds(env) == 1
    assert "every batch of the run was handed out: the run is over" in caplog.text


async def test_the_wait_for_the_end_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    env = idle(serving_env({"current_step": 4, "run_ended": False}, service_timeout=0.05))
    started = time.monotonic()
    while not await env._runner.one_round():
        assert time.monotonic() < started + 60, "it waits for ever"
        await asyncio.sleep(0.01)
    assert "did not end the run within 0.05 s" in caplog.text


async def test_the_service_waits_for_the_trainer_where_nothing_else_can_happen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = serving_env(
        {"current_step": 0, "groups_wanted": 0, "moves": 7},
        {"current_step": 1, "groups_wanted": 2, "moves": 8},
    )
    released = asyncio.Event()

    async def sampling(item_id: str) -> None:
        await released.wait()

    env.handle_env = sampling
    monkeypatch.setattr("atroposlib.envs.runner.runner.MIN_POLL_SECONDS", 0.0)
    monkeypatch.setattr("atroposlib.envs.runner.runner.POLL_SECONDS", 0.25)
    for _ in range(3):  # nothing is wanted; two groups are; they are in work
        assert not await env._runner.one_round()
        await env._runner._rest()
    assert env._runner.connections.service.waited == [(None, 0.0), (7, 0.25), (None, 0.0)]
    await stop_workers(env)


async def test_an_evaluation_that_ends_is_not_kept_waiting() -> None:
    env = serving_env({"current_step": 0, "groups_wanted": 0, "moves": 7})
    env._runner.state.eval_runner = asyncio.create_task(asyncio.Event().wait())
    for _ in range(2):
        assert not await env._runner.one_round()
    assert env._runner.connections.service.waited == [(None, 0.0)] * 2
    env._runner.state.eval_runner.cancel()


# ---- outages
# -----------------------------------------------------------------------------------------------------------


def test_an_item_that_waits_for_the_service_is_never_cut_off() -> None:
    """The service is away for longer than an item may take, with everything sampled: nothing is
    lost, nothing is failed.
    """

    class Posting(ScriptedEnv):
        waiting, back = 0, asyncio.Event()

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            self.waiting += 1
            await self.back.wait()
            await super()._send_scored_data_to_api(scored_data)

    async def work() -> None:
        env = serving_env(
            {"current_step": 0}, kind=Posting, worker_timeout=1.0, max_consecutive_failures=1
        )
        env.script = [response(1.0), response(-1.0)] * 2
        await env._runner.one_round()
        while env.waiting < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(1.5)  # longer than an item may take
        await env._runner.one_round()
        env._runner.start_evaluation()  # which stops the workers that sample
        env.back.set()
        await asyncio.wait(env.workers)
        assert len(env.posted) == 2
        assert (
            env.drops.total,
            env._runner.workers.failures_in_a_row,
            env._runner.workers.fatal,
        ) == (0, 0, None)
        assert "item" not in env._runner.state.backlog, "what is sampled is not sampled again"

    with virtual_time(items) as loop:
        loop.run_until_complete(work())


@pytest.mark.parametrize("away", ["the inference server", "a judge"])
def test_an_outage_does_not_count_as_an_items_time(
    monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    env = ScriptedEnv([response(1.0), response(-1.0)], worker_timeout=1.0)
    if away == "a judge":
        env.server.beside.append(OpenAIServer(APIServerConfig(base_url="http://judge.example")))
    pool = [*env.server.servers, *env.server.beside][-1].pool
    answers: list[str | None] = ["it starts"] * 4 + [None]

    async def probe() -> str | None:
        return answers.pop(0)

    pool.probe = probe
    waited: list[float] = []

    async def collect(item: Any) -> tuple[Any, list[Any]]:
        if not waited:
            waited.append(0.0)
            await pool.wait_until_well("cannot be reached")  # pauses of 0.2 s and more
        return dict(PAIR), []

    monkeypatch.setattr(env, "collect_trajectories", collect)
    with virtual_time(items, client, waiting) as loop:
        group = loop.run_until_complete(env._runner.rollouts.roll_out_in_time("item"))
        assert group["scores"] == [1.0, -1.0]
        assert pool.seconds_away > 1.0, "longer than an item may take"
    assert env.drops.total == 0


async def test_a_stuck_item_is_cut_off_and_cleans_up() -> None:
    cleaned = asyncio.Event()

    class Stuck(ScriptedEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.set()
            raise AssertionError

    env = Stuck([], worker_timeout=0.05)
    with pytest.raises(RolloutFailure, match=r"longer than 0\.05 s \(--env\.worker_timeout\)"):
        await env._runner.rollouts.work_on("item")
    assert cleaned.is_set()
    assert env.drops.by_reason == {"timeout": 1}


async def test_code_that_blocks_all_items_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def grade() -> None:
        while "stood still" not in caplog.text:
            time.sleep(0.01)

    class Blocking(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            grade()
            return await super().collect_trajectory(item)

    monkeypatch.setattr("atroposlib.envs.runner.runner.STANDSTILL_SECONDS", 0.2)
    steps = ({"current_step": step, "run_ended": step == 3} for step in range(4))
    env = serving_env(*steps, kind=Blocking)
    env.server = ServerManager([], testing=True)
    env.script = [response(float(number % 2)) for number in range(400)]
    await asyncio.wait_for(env.env_manager(), 60)
    place = r"grade \(test_env_workers\.py, line \d+\), and"
    assert re.search(rf"the event loop has stood still for \d+ s in \S*{place}", caplog.text)


# ---- broken items
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["handle_send_to_api", "cleanup"])
async def test_what_is_wrong_with_one_item_ends_that_item_only(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = serving_env({"current_step": 0}, max_consecutive_failures=3)
    env.script = [response(1.0), response(-1.0)] * 20
    calls = 0
    real = getattr(env, where)

    async def breaks_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("an id that no tokenizer knows")
        return await real(*args, **kwargs)

    setattr(env, where, breaks_once)
    while len(env.posted) < 3:
        assert not await env._runner.one_round()
        await asyncio.sleep(0)
    await stop_workers(env)
    assert env.drops.by_reason == {"errors": 1}
    assert "ValueError: an id that no tokenizer knows" in caplog.text


async def test_items_that_all_break_end_the_environment() -> None:
    env = serving_env({"current_step": 0}, max_consecutive_failures=3)
    env.script = [response(1.0), response(-1.0)] * 20

    async def breaks(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("broken")

    env.handle_send_to_api = breaks
    with pytest.raises(EnvironmentFailure, match=r"items all failed \(errors="):
        await rounds(env)


async def test_what_only_a_person_can_mend_ends_the_environment() -> None:
    env = serving_env({"current_step": 0})

    async def fails(item: Any) -> Any:
        raise InferenceUnavailable("gone")

    env.collect_trajectories = fails
    with pytest.raises(InferenceUnavailable, match="gone"):
        await rounds(env)


async def test_groups_that_are_all_too_long_are_counted_and_end_the_environment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = serving_env({"current_step": 0}, max_consecutive_failures=8)
    env.script = [response(1.0, length=12), response(-1.0, length=11)] * 20
    env._runner.state.max_token_len = 10
    text = (
        r"groups dropped in a row for their length: \d+\. Each has a sequence of 12 tokens or more, and the "
        r"trainer takes fewer than 10: raise the trainer's --seq-len, or lower --env\.max_token_length"
    )
    with pytest.raises(EnvironmentFailure, match=text):
        await rounds(env)
    assert re.fullmatch(text, env._runner.connections.service.trouble)
    counts = [re.findall(r"length: (\d+)", record.getMessage()) for record in caplog.records]
    assert counts[:4] == [["1"], ["2"], ["4"], ["8"]]


async def test_an_environment_whose_groups_sometimes_fit_goes_on() -> None:
    env = serving_env({"current_step": 0}, max_consecutive_failures=4)
    long, fit = [response(1.0, length=12), response(-1.0)], [response(1.0), response(-1.0)]
    env.script = [*fit, *long * 20, *fit * 40]
    env._runner.state.max_token_len = 10
    service, troubles = env._runner.connections.service, []
    while len(env.posted) < 2:
        assert not await env._runner.one_round()
        troubles.append(service.trouble)
        await asyncio.sleep(0)
    await env._runner.one_round()
    await stop_workers(env)
    assert troubles[0] == service.trouble == ""
    assert any("dropped in a row for their length" in trouble for trouble in troubles)


async def test_the_service_gets_the_reason_why_all_items_fail() -> None:
    env = serving_env({"current_step": 0}, rollout_retries=0, max_consecutive_failures=3)
    env.script = [ValueError("no such key")] * 40
    with pytest.raises(EnvironmentFailure, match="items all failed"):
        await rounds(env)
    reason = "the last one because: collect_trajectory: ValueError: no such key"
    assert env._runner.connections.service.trouble.endswith(reason)
