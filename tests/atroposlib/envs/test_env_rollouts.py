"""One item's way: retries, drops by reason, the backlog, versions; without any process."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from atroposlib.envs.runner.runner import crossed
from atroposlib.errors import RolloutFailure
from atroposlib.inference.generation import current_versions
from tests.atroposlib.envs.scripted_env import ScriptedEnv, response, run


def test_responses_become_a_group_and_their_items_the_backlog() -> None:
    env = ScriptedEnv([response(1.0), response(-1.0, length=5)])
    run(env)
    (group,) = env.posted
    assert group["scores"] == [1.0, -1.0]
    assert env._runner.state.backlog == ["after item", "after item"]
    assert env.completion_lengths == [2, 4]
    assert env.drops.total == 0


def test_a_response_that_fails_once_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    env = ScriptedEnv([RuntimeError("now and then"), response(1.0), response(-1.0)])
    run(env)
    assert len(env.posted) == 1
    assert env.drops.by_reason == {"errors_retried": 1}
    assert "RuntimeError: now and then" in caplog.text
    assert "Traceback" in caplog.text


def test_a_response_that_always_fails_gives_the_item_up_and_is_never_scored() -> None:
    env = ScriptedEnv([RuntimeError("broken")] * 6)
    with pytest.raises(RolloutFailure, match="RuntimeError: broken"):
        run(env)
    assert env.posted == []
    assert env.drops.by_reason["errors"] >= 1


def test_none_drops_the_item_and_is_counted() -> None:
    env = ScriptedEnv([response(), None])
    assert run(env) is None
    assert env.drops.by_reason == {"trajectory_is_none": 1}


def test_something_else_than_a_response_is_an_error() -> None:
    env = ScriptedEnv(["text", "text"], rollout_retries=0)
    with pytest.raises(RolloutFailure, match="must return a ScoredDataItem, not str"):
        run(env)


@pytest.mark.parametrize(
    ("script", "settings", "reason"),
    [
        ([response(1.0), response(1.0)], {}, "equal_scores"),
        ([response(1.0), response(float("nan"))], {}, "malformed"),
        ([response(1.0), response(-1.0, masks=[1])], {}, "malformed"),
        ([response(1.0), response(-1.0, length=10)], {}, "too_long"),
    ],
)
def test_what_is_dropped_is_counted_by_reason(
    script: list[Any], settings: dict[str, Any], reason: str
) -> None:
    env = ScriptedEnv(script, **settings)
    env.max_token_len = 10
    run(env)
    assert env.posted == []
    assert env.drops.by_reason == {reason: 1}


def test_equal_scores_may_be_wanted_and_one_response_alone_is_not_equal() -> None:
    env = ScriptedEnv([response(1.0), response(1.0)], ensure_scores_are_not_same=False)
    run(env)
    single = ScriptedEnv([response(1.0)], group_size=1)
    run(single)
    assert len(env.posted) == len(single.posted) == 1


def test_versions_that_the_environment_does_not_carry_are_the_oldest_it_met() -> None:
    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            record = current_versions.get()
            assert record is not None
            record.note([7, 5])
            return await super().collect_trajectory(item)

    env = Meets([response(1.0), response(-1.0)])
    run(env)
    assert env.posted[0]["weight_versions"] == [5, 5]
    own = Meets([response(1.0, weight_version=9), response(-1.0, weight_version=8)])
    run(own)
    assert own.posted[0]["weight_versions"] == [9, 8]
    assert "weight_epochs" not in env.posted[0] | own.posted[0], "no server told any"


def test_epochs_go_with_the_versions_and_the_oldest_weights_are_those_served_first() -> None:
    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            record = current_versions.get()
            assert record is not None
            record.note([17, 11], [1000, 2000])
            return await super().collect_trajectory(item)

    def posted(*script: dict[str, Any]) -> tuple[Any, Any]:
        env = Meets(list(script))
        run(env)
        return env.posted[0]["weight_versions"], env.posted[0]["weight_epochs"]

    assert posted(response(1.0), response(-1.0)) == ([17, 17], [1000, 1000]), (
        "by the record: 17 was served before 11"
    )
    own = [
        response(1.0, weight_version=17, weight_epoch=1000),
        response(-1.0, weight_version=11, weight_epoch=2000),
    ]
    assert posted(*own) == ([17, 11], [1000, 2000])
    without = [response(1.0, weight_version=11), response(-1.0, weight_version=12)]
    assert posted(*without) == ([11, 12], [1000, 1000]), (
        "an epoch that is not told is the oldest that it may be"
    )
    one = [response(1.0, weight_version=11, weight_epoch=2000), response(-1.0, weight_version=11)]
    assert posted(*one) == ([11, 11], [2000, 0])


@pytest.mark.parametrize(
    "empty",
    [{"advantages": [], "ref_logprobs": []}, {"inference_logprobs": [], "distill_logprobs": []}],
)
def test_what_is_empty_counts_as_not_given(empty: dict[str, Any]) -> None:
    """Environments written for Atropos post `[]` where they have nothing, for a group or for each
    response.
    """
    env = ScriptedEnv([response(1.0, **empty), response(-1.0, **empty)])
    run(env)
    asyncio.run(
        env.handle_send_to_api(
            {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]} | empty
        )
    )
    assert len(env.posted) == 2
    assert env.drops.total == 0
    for group in env.posted:
        assert not set(empty) & set(group), "a service may refuse a list that does not line up"


def test_a_list_of_groups_is_sent_as_a_list_without_what_is_dropped() -> None:
    env = ScriptedEnv([])
    good = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}
    equal = good | {"scores": [1.0, 1.0]}
    asyncio.run(env.handle_send_to_api([dict(good), None, equal, dict(good)]))
    assert [len(posted) for posted in env.posted] == [2]
    assert env.drops.by_reason == {"equal_scores": 1}


def test_a_multiple_is_crossed_once_however_far_the_trainer_moves() -> None:
    steps = [0, 1, 4, 5, 9, 10, 21, 22]
    assert [now for before, now in pairwise(steps) if crossed(before, now, 5)] == [5, 10, 21]


@pytest.mark.parametrize(("count", "workers"), [(2, 8), (2, 1), (0, 8)])
def test_process_stops_when_items_run_out(count: int, workers: int) -> None:
    class Runs(ScriptedEnv):
        items = count

        async def get_next_item(self) -> Any:
            self.items -= 1
            return "item" if self.items >= 0 else None

        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            return response(), []

    env = Runs([], ensure_scores_are_not_same=False, total_steps=5, max_num_workers=workers)
    asyncio.run(env._runner.make_groups())
    assert env.curr_step == count


def test_process_counts_the_drops_of_each_item_alone() -> None:
    """Two items at once, one of them dropped while the other is under way: the other's group
    counts.
    """

    class Runs(ScriptedEnv):
        items: list[int]

        async def get_next_item(self) -> Any:
            return self.items.pop(0) if self.items else None

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            if item == 0:  # all its neighbours are dropped before it is done
                await neighbours.wait()
            scores = [1.0, -1.0] if item == 0 else [1.0, 1.0]
            return {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": scores}, []

        async def cleanup(self) -> None:
            if self.drops.total == 2:
                neighbours.set()

    async def whole() -> Runs:
        env = Runs([], max_num_workers=3, total_steps=3)
        env.items = [0, 1, 2]
        await env._runner.make_groups()
        return env

    neighbours = asyncio.Event()
    env = asyncio.run(whole())
    assert (env.curr_step, env.drops.by_reason) == (1, {"equal_scores": 2})


def seeds_of(items: int, **settings: Any) -> list[list[int | None]]:
    """Return the sampling seeds of two requests of each of a few items that are in work at the same
    time.
    """
    found: list[list[int | None]] = [[] for _ in range(items)]

    class SeededEnv(ScriptedEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            found[item].append(self.sampling_seed())
            await asyncio.sleep(0.01 * (items - item))  # the first to begin is the last to end
            found[item].append(self.sampling_seed(1))
            return None, []

    async def whole() -> None:
        env = SeededEnv([], **settings)
        await asyncio.gather(*(env._runner.rollouts.roll_out(item) for item in range(items)))

    asyncio.run(whole())
    return found


def test_each_request_of_each_item_has_a_seed_that_only_the_settings_decide() -> None:
    first = seeds_of(3, seed_rollouts=True, seed=1)
    assert first == seeds_of(3, seed_rollouts=True, seed=1)
    flat = {seed for row in first for seed in row}
    assert len(flat) == 6
    assert not flat & {seed for row in seeds_of(3, seed_rollouts=True, seed=2) for seed in row}
    assert seeds_of(2) == [[None, None], [None, None]]
    with pytest.raises(RuntimeError, match="the item in work"):
        ScriptedEnv([], seed_rollouts=True).sampling_seed()
