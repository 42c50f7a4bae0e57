"""`process`: roll out a number of items without a trainer and keep the groups.

`evaluate`: measure once.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from atroposlib.envs.runner.servers import close_servers, wait_for_inference
from atroposlib.errors import EnvironmentFailure, RolloutFailure

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)


async def process(env: "BaseEnv") -> None:
    """See `BaseEnv.process_manager`."""
    env.process_mode = True
    env.config.group_size = env.group_size_to_process
    try:
        await env.setup()
        await env.wait_for_servers()
        env._reports.start_wandb(env.wandb_project, env.wandb_group)
        await make_groups(env)
        await env.wandb_log({})
    finally:
        await close_servers(env)
        env._reports.close()


async def make_groups(env: "BaseEnv") -> None:
    groups_to_make, running = env.n_groups_to_process, set[asyncio.Task[bool]]()
    groups, failed_in_a_row, exhausted = 0, 0, False
    try:
        while groups < groups_to_make and (running or not exhausted):
            while not exhausted and len(running) < min(
                env.max_num_workers, groups_to_make - groups
            ):
                item = env.backlog.pop() if env.backlog else await env.next_item()
                if item is None:
                    logger.info("no more items after %d groups", groups)
                    exhausted = True
                    break
                running.add(asyncio.create_task(process_item(env, item)))
            finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                groups += task.result()
                failed_in_a_row = 0 if task.result() else failed_in_a_row + 1
            env.curr_step = groups
            logger.info("%d of %d groups (%s dropped)", groups, groups_to_make, env.drops)
            if 0 < env.config.max_consecutive_failures <= failed_in_a_row:
                raise EnvironmentFailure(
                    f"the last {failed_in_a_row} items gave no group ({env.drops})"
                )
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=10)


async def process_item(env: "BaseEnv", item: Any) -> bool:
    """Whether the item gave at least one group that was kept."""
    try:
        _, kept = await env._rollouts.work_on(item, send=False)
    except RolloutFailure as failure:
        logger.error("an item was given up: %s", failure)
        return False
    return kept > 0


async def evaluate_once(env: "BaseEnv") -> None:
    """Evaluate once, as the `evaluate` command does."""
    try:
        await env.setup()
        await wait_for_inference(env)
        env._reports.start_wandb(env.wandb_project, env.wandb_group)
        await env.evaluate()
    finally:
        await close_servers(env)
        env._reports.close()
