"""`process`: roll out a number of items without a trainer and keep the groups. `evaluate`: measure once."""

import asyncio
import logging
from typing import Any

from atroposlib.envs._runtime.rollouts import RolloutMixin
from atroposlib.errors import EnvironmentFailure, RolloutFailure

logger = logging.getLogger(__name__)


class ProcessingMixin(RolloutMixin):
    """The commands that need no rollout service."""

    async def process_manager(self) -> None:
        """Make `n_groups_to_process` groups, `max_num_workers` at a time, and write them to `data_path_to_save_groups`.

        Raises:
            EnvironmentFailure: too many items in a row failed.
        """
        self.process_mode = True
        self.config.group_size = self.group_size_to_process
        try:
            await self.setup()
            await self.wait_for_servers()
            self.start_wandb(self.wandb_project, self.wandb_group)
            await self._make_groups()
            await self.wandb_log({})
        finally:
            await self.close_servers()
            if self.jsonl_writer is not None:
                self.jsonl_writer.close()
            if self._wandb is not None:
                self._wandb.finish()

    async def _make_groups(self) -> None:
        wanted, running = self.n_groups_to_process, set[asyncio.Task[bool]]()
        made, failed_in_a_row, exhausted = 0, 0, False
        try:
            while made < wanted and (running or not exhausted):
                while not exhausted and len(running) < min(self.max_num_workers, wanted - made):
                    item = self.backlog.pop() if self.backlog else await self.get_next_item()
                    if item is None:
                        logger.info("no more items after %d groups", made)
                        exhausted = True
                        break
                    running.add(asyncio.create_task(self._process_item(item)))
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    made += task.result()
                    failed_in_a_row = 0 if task.result() else failed_in_a_row + 1
                self.curr_step = made
                logger.info("%d of %d groups (%s dropped)", made, wanted, self.drops)
                if 0 < self.config.max_consecutive_failures <= failed_in_a_row:
                    raise EnvironmentFailure(f"the last {failed_in_a_row} items gave no group ({self.drops})")
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=10)

    async def _process_item(self, item: Any) -> bool:
        """Whether the item gave at least one group that was kept."""
        try:
            _, kept = await self.work_on(item, send=False)
        except RolloutFailure as failure:
            logger.error("an item was given up: %s", failure)
            return False
        return kept > 0

    async def _run_evaluate(self) -> None:
        """Evaluate once, as the `evaluate` command does."""
        try:
            await self.setup()
            await self.wait_for_inference()
            self.start_wandb(self.wandb_project, self.wandb_group)
            await self.evaluate()
        finally:
            await self.close_servers()
            if self._wandb is not None:
                self._wandb.finish()
