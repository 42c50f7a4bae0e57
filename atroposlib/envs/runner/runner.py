"""The runner of an environment: it makes the parts and lets them `serve`, `process` or `evaluate`."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.runner.connections import Connections
from atroposlib.envs.runner.delivery import Delivery
from atroposlib.envs.runner.reporting import Reports
from atroposlib.envs.runner.rollout import Rollouts
from atroposlib.envs.runner.serve import Serving
from atroposlib.envs.runner.state import Author, RunState, take_item
from atroposlib.envs.runner.workers import Workers
from atroposlib.errors import EnvironmentFailure, RolloutFailure
from atroposlib.inference.server_manager import ServerManager
from atroposlib.utils.jsonl import JsonLinesWriter, unused_path

logger = logging.getLogger(__name__)


class Runner:
    """The parts that run an environment.

    Args:
        author: the environment, whose methods the parts call.
        config: its settings.
        server: the inference servers.

    Attributes:
        state: configuration, progress, items in work and counters.
        connections: clients of the servers around the environment.
        rollouts: from an item to its groups.
        delivery: from groups to the service.
        workers: items in work.
        reports: metrics and evaluations.
        serving: the run beside a trainer.
    """

    def __init__(self, author: Author, config: BaseEnvConfig, server: ServerManager):
        self.author = author
        self.state = state = RunState(config, len(server.servers))
        self.connections = connections = Connections(state, author, server)
        self.rollouts = Rollouts(state, connections, author)
        self.delivery = Delivery(state, connections, author)
        self.reports = Reports(state, connections, author)
        self.workers = Workers(state, connections, author, self.rollouts)
        self.serving = Serving(state, connections, author, self.workers, self.reports)
        if config.data_path_to_save_groups is not None:
            path = str(unused_path(Path(config.data_path_to_save_groups)))
            config.data_path_to_save_groups = path
            state.jsonl_writer = JsonLinesWriter(path)

    async def process(self) -> None:
        """See `BaseEnv.process_manager`."""
        self.state.process_mode = True
        try:
            await self.author.setup()
            await self.author.wait_for_servers()
            self.reports.start_wandb(self.state.wandb_project, self.state.wandb_group)
            await self.make_groups()
            await self.author.wandb_log({})
        finally:
            await self.connections.close()
            self.reports.close()

    async def make_groups(self) -> None:
        """Work on items, `max_num_workers` at a time, until there are `total_steps` groups."""
        state, running = self.state, set[asyncio.Task[bool]]()
        target = state.config.total_steps
        groups, failed_in_a_row, exhausted = 0, 0, False
        try:
            while groups < target and (running or not exhausted):
                missing = target - groups
                while not exhausted and len(running) < min(state.max_num_workers, missing):
                    item = await take_item(state, self.author)
                    if item is None:
                        logger.info("no more items after %d groups", groups)
                        exhausted = True
                        break
                    running.add(asyncio.create_task(self._keeps_a_group(item)))
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    groups += task.result()
                    failed_in_a_row += 1
                    if task.result():
                        failed_in_a_row = 0
                state.curr_step = groups
                logger.info("%d of %d groups (%s dropped)", groups, target, state.drops)
                if 0 < state.config.max_consecutive_failures <= failed_in_a_row:
                    raise EnvironmentFailure(
                        f"the last {failed_in_a_row} items gave no group ({state.drops})"
                    )
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=10)

    async def _keeps_a_group(self, item: Any) -> bool:
        """Work on an item; True if at least one group of it was kept."""
        try:
            _, kept = await self.rollouts.work_on(item, send=False)
        except RolloutFailure as failure:
            logger.error("an item was given up: %s", failure)
            return False
        return kept > 0

    async def evaluate(self) -> None:
        """Evaluate once, as the `evaluate` command does."""
        try:
            await self.author.setup()
            await self.connections.wait_for_inference()
            self.reports.start_wandb(self.state.wandb_project, self.state.wandb_group)
            await self.author.evaluate()
        finally:
            await self.connections.close()
            self.reports.close()
