"""An override of an environment runs wherever the SDK needs it; and `super()` does the work of the
SDK.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from atroposlib.inference.server_manager import ServerManager
from tests.atroposlib.envs.scripted_env import ScriptedEnv, response
from tests.rollout_standin import RolloutStandin

SERVING = (
    *(
        "env_manager",
        "setup",
        "wait_for_servers",
        "setup_wandb",
        "register_env",
        "get_server_info",
        "get_status",
        "env_step_checks",
    ),
    *(
        "add_train_workers",
        "handle_env",
        "get_next_item",
        "collect_trajectories",
        "collect_trajectory",
        "postprocess_histories",
    ),
    *("handle_send_to_api", "add_rollouts_for_wandb", "_send_scored_data_to_api", "cleanup"),
    *("evaluate", "save_checkpoint", "load_checkpoint", "wandb_log", "perf_stats"),
)
"""Methods that environments of others override, or that one would, and that a run beside a trainer
uses."""


def overriding(calls: list[str], *names: str) -> type[ScriptedEnv]:
    """An environment that overrides methods by ones that note the call and do what the SDK does."""

    def override(name: str) -> Any:
        plain = getattr(ScriptedEnv, name)
        if inspect.iscoroutinefunction(plain):

            async def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return await plain(self, *args, **kwargs)

            return noted

        def noted_at_once(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return plain(self, *args, **kwargs)

        return noted_at_once

    return type("Overriding", (ScriptedEnv,), {name: override(name) for name in names})


async def test_what_is_overridden_is_what_a_run_uses() -> None:
    calls: list[str] = []
    script = [response(float(number % 2)) for number in range(400)]
    env = overriding(calls, *SERVING)(script, steps_per_eval=2, max_num_workers=2)
    env.server = ServerManager([], testing=True)
    # Its trainer resumes at step 4, and goes one step further each time that it is asked.
    steps = ({"current_step": step, "run_ended": step == 9} for step in range(4, 10))
    env._runner.connections.service = RolloutStandin(*steps)  # type: ignore[assignment]
    await asyncio.wait_for(env.env_manager(), 60)
    assert set(calls) == set(SERVING)
    assert calls[:5] == ["env_manager", "setup", "wait_for_servers", "setup_wandb", "register_env"]
    assert env.posted, "the groups went by the override to where it sends them"
    assert calls.count("cleanup") >= calls.count("handle_send_to_api") > 0


async def test_an_override_that_changes_what_is_passed_on_is_heeded() -> None:
    class Halved(ScriptedEnv):
        async def handle_send_to_api(self, scored_data: Any, *args: Any, **kwargs: Any) -> int:
            scored_data["scores"] = [score / 2 for score in scored_data["scores"]]
            return await super().handle_send_to_api(scored_data, *args, **kwargs)

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            group, backlog = await super().collect_trajectories(item)
            return group | {"messages": ["mine"] * 2}, backlog

    env = Halved([response(1.0), response(-1.0)])
    groups, kept = await env._runner.rollouts.work_on("item")
    assert kept == 1
    assert env.posted[0]["scores"] == groups["scores"] == [0.5, -0.5]
    assert env.posted[0]["messages"] == ["mine"] * 2


def test_the_runs_state_that_an_author_sets_is_the_runners() -> None:
    """In a class, before and after `super().__init__`, as environments of others do."""

    class Author(ScriptedEnv):
        curr_step = 3
        completion_lengths = (1,)

        def __init__(self) -> None:
            self.rollouts_for_wandb = [[("early", 1.0)]]
            assert self.rollouts_for_wandb == [[("early", 1.0)]]
            super().__init__([])
            self.max_token_len = 7

    env, other = Author(), Author()
    state = env._runner.state
    assert (env.curr_step, env.completion_lengths, env.rollouts_for_wandb) == (0, [], [])
    assert (state.max_token_len, other.max_token_len) == (7, 7)
    state.curr_step = 5
    env.completion_lengths.append(2)
    assert (env.curr_step, state.completion_lengths) == (5, [2])
    assert (other.curr_step, other.completion_lengths) == (0, [])


def test_state_that_is_read_too_early_says_what_to_call() -> None:
    with pytest.raises(AttributeError, match=r"call super\(\).__init__\(\) first"):
        _ = object.__new__(ScriptedEnv).drops
