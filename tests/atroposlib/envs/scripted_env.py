"""An environment that needs no process around it: its responses come from a list, what it posts
goes to another.
"""

import asyncio
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


def response(score: float = 1.0, length: int = 3, **more: Any) -> dict[str, Any]:
    tokens = list(range(1, length + 1))
    return {"tokens": tokens, "masks": [-100, *tokens[1:]], "scores": score} | more


class ScriptedEnv(BaseEnv):
    """Gives the responses of a list one after the other; an exception in it is raised."""

    name = "scripted"

    def __init__(self, script: list[Any], **settings: Any):
        super().__init__(
            BaseEnvConfig(**({"group_size": 2, "rollout_retries": 1} | settings)),
            [APIServerConfig(base_url="http://x")],
        )
        self.script = script
        self.posted: list[Any] = []

    async def setup(self) -> None:
        """Nothing to load."""

    async def get_next_item(self) -> Any:
        return "item"

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to measure."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step, [f"after {item}"]

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        self.posted.append(scored_data)


def run(env: ScriptedEnv) -> Any:
    """One item's way to the service. Its outcome."""

    async def whole() -> Any:
        groups = await env._runner.rollouts.roll_out("item")
        if groups is not None:
            await env.handle_send_to_api(groups, "item")
        return groups

    return asyncio.run(whole())
