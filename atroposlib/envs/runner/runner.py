"""The runner of an environment: it makes the parts and lets them `serve`, `process` or `evaluate`.

Beside a trainer it registers, keeps workers busy, evaluates, logs, and stops.
"""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.runner.items import Delivery, Rollouts, Workers, take_item
from atroposlib.envs.runner.reporting import Reports
from atroposlib.envs.runner.state import Author, Connections, RunState
from atroposlib.errors import EnvironmentFailure, RolloutFailure, ServiceUnavailable
from atroposlib.inference.client import APIServer
from atroposlib.inference.server_manager import ServerManager
from atroposlib.service_client import RejectedByService
from atroposlib.utils.jsonl import JsonLinesWriter, replace_file, unused_path
from atroposlib.utils.loop_watch import LoopWatch
from atroposlib.utils.waiting import Patience, awaited

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two requests for the queue's state. A finished worker asks at once. If no worker
runs, the service answers as soon as the trainer does something."""

MIN_POLL_SECONDS = 0.05

STANDSTILL_SECONDS = 5.0
"""Code that blocks all items for as long is named in the log."""
LAST_EVALUATION_SECONDS = 120.0
"""Seconds that an evaluation may run after training is over. The inference server may be stopped at
any moment then."""


def crossed(previous: int, now: int, every: int) -> bool:
    """Return whether a multiple of `every` lies in (previous, now]: the trainer may move several
    steps between two looks.
    """
    return now // every > previous // every


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
    """

    def __init__(self, author: Author, config: BaseEnvConfig, server: ServerManager):
        self.author = author
        self.state = state = RunState(config, len(server.servers))
        self.connections = connections = Connections(state, author, server)
        self.rollouts = Rollouts(state, connections, author)
        self.delivery = Delivery(state, connections, author)
        self.reports = Reports(state, connections, author)
        self.workers = Workers(
            state, connections, author, self.rollouts, self.delivery.length_drops
        )
        self.trainer_steps = -1
        self._last_round: float | None = None
        self._handed_out: tuple[int, float] | None = None
        """When every step was handed out: the step that was reached, and since when nothing has
        moved."""
        if config.data_path_to_save_groups is not None:
            path = str(unused_path(Path(config.data_path_to_save_groups)))
            config.data_path_to_save_groups = path
            state.jsonl_writer = JsonLinesWriter(path)

    # ---- the run beside a trainer

    async def serve(self) -> None:
        """See `BaseEnv.env_manager`."""
        try:
            await awaited(self.author.setup(), "setup", self.author)
            await self.author.wait_for_servers()
            await self.author.setup_wandb()
            await self.author.register_env()
            await self.author.get_server_info()
            with LoopWatch(STANDSTILL_SECONDS):
                while not await self.one_round():
                    await self._rest()
            logger.info(
                "the trainer reached step %d: done (%s dropped)",
                self.state.curr_step,
                self.state.drops,
            )
            await self._log_remaining()
        finally:
            await self._stop()

    async def one_round(self) -> bool:
        """Ask for the state, start what is due. True when training is over."""
        now = time.monotonic()
        if self._last_round is not None:
            self.state.timings["mainloop_timings"].append(now - self._last_round)
        self._last_round = now
        if self.connections.server.follower is not None and self.state.config.max_num_workers <= 0:
            self.state.max_num_workers = self.state.config.max_num_workers_per_node * len(
                self.connections.server.servers
            )
        self.workers.busy_when_asked = len(self.state.workers)
        await self.author.get_status()
        self.workers.check_health()
        await self.author.env_step_checks()
        if self._training_is_over():
            return True
        await self.author.add_train_workers()
        return False

    async def _rest(self) -> None:
        """Sleep until a worker finishes, for half a second at most.

        Where there is none, the service waits in our place.
        """
        await asyncio.sleep(MIN_POLL_SECONDS)
        if self._idle():
            return
        try:
            # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation, and SIGTERM
            # with it.
            async with asyncio.timeout(POLL_SECONDS):
                await self.workers.wake.wait()
        except TimeoutError:
            return
        finally:
            self.workers.wake.clear()

    def _idle(self) -> bool:
        """Return whether nothing happens here before the trainer does something, which the service
        reports.
        """
        return (
            not self.state.workers
            and self.state.eval_runner is None
            and "moves" in self.state.status_dict
        )

    # ---- the service
    # ---------------------------------------------------------------------------------------------------

    async def setup_wandb(self) -> None:
        """Start a W&B run in the trainer's project and group."""
        if not self.state.config.use_wandb:
            return
        patience = self._patience_for_trainer()
        while True:
            info = await self.connections.service.get("/wandb_info")
            if info.get("project") is not None:
                break
            await patience.wait("has no trainer registered")
        self.state.wandb_project, self.state.wandb_group = info["project"], info["group"]
        self.reports.start_wandb(self.state.wandb_project, self.state.wandb_group)

    async def _post_registration(self) -> dict[str, Any]:
        registration = {
            "max_token_length": self.state.config.max_token_length,
            "desired_name": self.reports.label,
            "weight": self.state.config.inference_weight,
            "min_batch_allocation": self.state.config.min_batch_allocation,
            "group_size": self.state.config.group_size,
        }
        if self.state.config.exact_resume:
            registration["stream"] = self.workers.stream
        return await self.connections.service.post("/register-env", registration)

    async def register(self) -> None:
        """Register, waiting for the trainer as long as `service_timeout` allows."""
        patience = self._patience_for_trainer()
        while True:
            try:
                data = await self._post_registration()
            except RejectedByService as rejection:
                raise EnvironmentFailure(
                    f"the rollout service refused the registration: {rejection}"
                ) from rejection
            if data.get("status") == "success":
                break
            await patience.wait(str(data.get("reason") or data.get("status", data)))
        patience.done()
        first_time = self.state.env_id is None
        self.state.env_id = data["env_id"]
        self.reports.evaluations_taken = True
        self.state.wandb_prepend = data["wandb_name"]
        self.state.checkpoint_dir = data["checkpoint_dir"]
        self.state.checkpoint_interval = data["checkpoint_interval"]
        self.trainer_steps = data["num_steps"]
        if first_time:
            self.state.curr_step = data["starting_step"]
            if (
                self.state.curr_step > 0 and not self.state.config.exact_resume
            ):  # there the service decides which item comes next
                self.author.load_checkpoint()
        logger.info(
            "registered as %s (id %s), training to step %s",
            self.state.wandb_prepend,
            self.state.env_id,
            self._last_step(),
        )

    def _patience_for_trainer(self) -> Patience:
        return Patience(
            f"a trainer at {self.state.config.rollout_server_url}",
            self.state.config.service_timeout,
            ServiceUnavailable,
            logger,
            "start one, for example `python -u example_trainer/grpo.py --model-name …`",
        )

    async def get_info(self) -> None:
        """See `BaseEnv.get_server_info`."""
        info = await self.connections.service.get("/info")
        if info.get("batch_size", -1) != -1:
            self.state.config.batch_size = info["batch_size"]
        if info.get("max_token_len", -1) != -1:
            self.state.max_token_len = info["max_token_len"]
        if 0 < self.state.config.batch_size < self.state.config.group_size:
            raise EnvironmentFailure(
                f"--env.group_size {self.state.config.group_size} does not fit into the trainer's batch of "
                f"{self.state.config.batch_size} sequences: lower it, or raise the trainer's batch"
            )
        for server in self.connections.server.servers:
            if isinstance(server, APIServer) and self.state.max_token_len > 0:
                server.max_sequence_length = self.state.max_token_len - 1

    async def get_status(self) -> None:
        """Ask for the queue's state. Register again with a service that has lost this environment.

        If every batch of the run had been handed out, such a service has begun another run, and
        this environment ends.
        """
        patience: Patience | None = None
        while True:
            assert self.state.env_id is not None
            until_change: tuple[Any, ...] = ()
            if patience is None and self._idle():
                until_change = self.state.status_dict["moves"], POLL_SECONDS
            try:
                status = await self.connections.service.status_env(
                    self.state.env_id, *until_change, trouble=self.workers.trouble()
                )
            except RejectedByService as rejection:
                status = {"status": str(rejection)}
            if "current_step" in status:
                break
            why = f"does not know environment {self.state.env_id} ({status})"
            if self._handed_out is not None:
                logger.info(
                    "the rollout service %s, and every batch of the run was handed out: the run is over",
                    why,
                )
                self.state.status_dict = self.state.status_dict | {"run_ended": True}
                return
            logger.warning("the rollout service %s: registering again", why)
            if patience is None:
                patience = self._patience_for_trainer()
            else:
                await patience.wait(why)
            await self.author.register_env()
            await self.author.get_server_info()
        if status["current_step"] < self.state.curr_step:
            logger.info(
                "the trainer went back from step %d to %d",
                self.state.curr_step,
                status["current_step"],
            )
            await self.author.get_server_info()
        self.state.status_dict = status
        self.workers.heed_position(status)
        await self.connections.server.update_weight(status.get("env_weight", 1.0))

    def _last_step(self) -> int:
        """The step after which there is nothing left to do; -1 when neither the trainer nor the
        configuration sets one.
        """
        return min(
            (step for step in (self.state.config.total_steps, self.trainer_steps) if step > 0),
            default=-1,
        )

    def _training_is_over(self) -> bool:
        """Return whether there is nothing more to do, as of the status asked for last.

        A run does not end when its last batch is handed out. Until the trainer reports the end, it
        may come back from a checkpoint and request batches again.
        """
        status, last = self.state.status_dict, self._last_step()
        if status.get("run_ended"):
            return True
        if not 0 < last <= status["current_step"]:
            self._handed_out = None
            return False
        if last == self.state.config.total_steps or "run_ended" not in status:
            return True  # our own limit, or a service that does not report the run's end
        if self._handed_out is None:
            logger.info(
                "every batch up to step %d is handed out: waiting for the trainer to end the run",
                last,
            )
        if self._handed_out is None or self._handed_out[0] != status["current_step"]:
            # Beyond its last step, too: a trainer may have come back to do more steps than it first
            # announced.
            self._handed_out = status["current_step"], time.monotonic()
        if time.monotonic() - self._handed_out[1] < self.state.config.service_timeout:
            return False
        logger.warning(
            "the trainer did not end the run within %g s (--env.service_timeout)",
            self.state.config.service_timeout,
        )
        return True

    # ---- steps
    # -----------------------------------------------------------------------------------------------------------

    async def after_a_step(self) -> None:
        """Evaluate, keep state and log after a step of the trainer, as far as each is due."""
        step = self.state.status_dict["current_step"]
        if step == self.state.curr_step:
            return
        previous, self.state.curr_step = self.state.curr_step, step
        every = self.state.config.steps_per_eval
        if every > 0 and crossed(previous, step, every):
            self.start_evaluation()
        if self.state.checkpoint_interval > 0 and crossed(
            previous, step, self.state.checkpoint_interval
        ):
            self.author.save_checkpoint(
                step // self.state.checkpoint_interval * self.state.checkpoint_interval
            )
        if self.state.items_sent_this_step >= self.state.config.min_items_sent_before_logging:
            self.state.items_sent_this_step = 0
            await self.author.wandb_log({})

    def start_evaluation(self) -> None:
        if self.state.eval_runner is not None and not self.state.eval_runner.done():
            logger.warning(
                "the previous evaluation still runs: the one due at step %d is left out",
                self.state.curr_step,
            )
            return
        logger.info("evaluating at step %d", self.state.curr_step)
        self.state.eval_runner = asyncio.create_task(self.reports.recorded_evaluation())
        self.state.eval_runner.add_done_callback(self._evaluation_done)
        if self.state.config.eval_handling is EvalHandlingEnum.STOP_TRAIN:
            for item_id, running in list(self.state.running_items.items()):
                if (
                    not running.collected
                ):  # what is sampled already asks nothing more of the servers
                    self.workers.put_back(item_id)

    def _evaluation_done(self, task: asyncio.Task[Any]) -> None:
        if self.state.eval_runner is task:
            self.state.eval_runner = None  # with it goes all that the evaluation held on to
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the evaluation failed; training goes on", exc_info=error)
            if isinstance(error, EnvironmentFailure):
                self.workers.fatal = error
        self.workers.wake.set()

    def _state_path(self, step: int) -> Path:
        return (
            Path(self.state.checkpoint_dir)
            / "env_checkpoints"
            / (self.state.wandb_prepend or "env")
            / f"step-{step}.json"
        )

    def load_state(self) -> None:
        """See `BaseEnv.load_checkpoint`."""
        path = self._state_path(self.state.curr_step)
        if path.exists():
            for key, value in json.loads(path.read_text()).items():
                setattr(self.author, key, value)
            logger.info("resumed from %s", path)

    def keep_state(self, step: int, data: dict[str, Any] | None) -> None:
        """See `BaseEnv.save_checkpoint`."""
        if data is None:
            return
        path = self._state_path(step)
        replace_file(path, json.dumps(data).encode())
        logger.info("kept the environment's state of step %d in %s", step, path)

    async def _log_remaining(self) -> None:
        if self.state.eval_runner is not None and not self.state.eval_runner.done():
            logger.info("waiting for the evaluation that still runs")
            await asyncio.wait({self.state.eval_runner}, timeout=LAST_EVALUATION_SECONDS)
        await self.author.wandb_log({})

    async def _stop(self) -> None:
        """Cancel what runs, deregister, close files and connections."""
        tasks = self.state.workers | self.state.eval_workers
        if self.state.eval_runner is not None:
            tasks.add(self.state.eval_runner)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        if self.state.env_id is not None:
            await self.connections.service.disconnect(self.state.env_id)
        await self.connections.service.close()
        await self.connections.close()
        self.reports.close()

    # ---- without a trainer

    async def process(self) -> None:
        """See `BaseEnv.process_manager`."""
        self.state.process_mode = True
        try:
            await awaited(self.author.setup(), "setup", self.author)
            await self.author.wait_for_servers()
            self.reports.start_wandb(self.state.wandb_project, self.state.wandb_group)
            with LoopWatch(STANDSTILL_SECONDS):
                await self.make_groups()
            await self.author.wandb_log({})
            if not self.state.curr_step:
                raise EnvironmentFailure(
                    f"no group of {self.state.config.total_steps} was made ({self.state.drops} "
                    "dropped): see the lines above, and what get_next_item of "
                    f"{type(self.author).__name__} returns"
                )
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
                    task = asyncio.create_task(self._keeps_a_group(item))
                    # The first failure ends the loop; asyncio would print each other one.
                    task.add_done_callback(lambda one: one.cancelled() or one.exception())
                    running.add(task)
                if not running:
                    break
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
                        f"the last {failed_in_a_row} items gave no group ({state.drops}): see the "
                        "errors above, or raise --env.max_consecutive_failures"
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
            await awaited(self.author.setup(), "setup", self.author)
            await self.connections.wait_for_inference()
            self.reports.start_wandb(self.state.wandb_project, self.state.wandb_group)
            with LoopWatch(STANDSTILL_SECONDS):
                result = await self.author.evaluate()
            if result == {}:
                raise EnvironmentFailure(
                    f"evaluate of {type(self.author).__name__} returned no metrics, so nothing was "
                    "measured: give it problems, for instance by eval_problems"
                )
        finally:
            await self.connections.close()
            self.reports.close()
