"""The life of an environment that serves: set up, register, keep workers busy, evaluate when due, stop after training."""

import asyncio
import logging
import time
from typing import Any

from atroposlib.envs._runtime.service_client import RejectedByService
from atroposlib.envs._runtime.workers import WorkersMixin
from atroposlib.envs.config import EvalHandlingEnum
from atroposlib.errors import EnvironmentFailure, ServiceUnavailable
from atroposlib.inference.server_baseline import APIServer
from atroposlib.utils.waiting import Patience

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often the service is asked for the queue's state when nothing else happens; a finished worker asks at once."""

LEAST_POLL_SECONDS = 0.05

LAST_EVALUATION_SECONDS = 120.0
"""How long an evaluation may still run after training is over; the inference server may be stopped at any moment then."""


class ServingMixin(WorkersMixin):
    """`env_manager` runs the whole life cycle."""

    _trainer_steps = -1
    _handed_out: tuple[int, float] | None = None
    """When every step was handed out: the step that was reached, and since when nothing has moved."""

    async def env_manager(self) -> None:
        """Serve until the trainer is done.

        Raises:
            EnvironmentFailure: something that only a person can mend; the message says what.
        """
        self._wake = asyncio.Event()
        try:
            await self.setup()
            await self.wait_for_servers()
            await self.setup_wandb()
            await self.register_env()
            await self.get_server_info()
            while not await self._one_round():
                await self._rest()
            logger.info("the trainer reached step %d: done (%s dropped)", self.curr_step, self.drops)
            await self._log_remaining()
        finally:
            await self._stop()

    async def _one_round(self) -> bool:
        """Ask for the state, start what is due. True when training is over."""
        now = time.monotonic()
        if self.last_loop_time is not None:
            self.mainloop_timings.append(now - self.last_loop_time)
        self.last_loop_time = now
        if self.server.follower is not None and self.config.max_num_workers <= 0:
            self.max_num_workers = self.config.max_num_workers_per_node * len(self.server.servers)
        self._busy_when_asked = len(self.workers)
        await self.get_status()
        self._check_health()
        await self.env_step_checks()
        if self._training_is_over():
            return True
        await self.add_train_workers()
        return False

    async def _rest(self) -> None:
        """Sleep until a worker finishes, for half a second at most."""
        assert self._wake is not None
        await asyncio.sleep(LEAST_POLL_SECONDS)
        try:
            # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation, and SIGTERM with it.
            async with asyncio.timeout(POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    # ---- the service ---------------------------------------------------------------------------------------------------

    async def setup_wandb(self) -> None:
        """Start a W&B run in the trainer's project and group."""
        if not self.config.use_wandb:
            return
        patience = self._patience_for_trainer()
        while True:
            info = await self.service.get("/wandb_info")
            if info.get("project") is not None:
                break
            await patience.wait("has no trainer registered")
        self.wandb_project, self.wandb_group = info["project"], info["group"]
        self.start_wandb(self.wandb_project, self.wandb_group)

    async def _register_env(self) -> dict[str, Any]:
        return await self.service.post(
            "/register-env",
            {
                "max_token_length": self.config.max_token_length,
                "desired_name": self._label,
                "weight": self.config.inference_weight,
                "min_batch_allocation": self.config.min_batch_allocation,
                "group_size": self.config.group_size,
                **({"stream": self._stream} if self.config.exact_resume else {}),
            },
        )

    async def register_env(self) -> None:
        """Register, waiting for the trainer as long as `service_timeout` allows."""
        patience = self._patience_for_trainer()
        while True:
            try:
                data = await self._register_env()
            except RejectedByService as rejection:
                raise EnvironmentFailure(f"the rollout service refused the registration: {rejection}") from rejection
            if data.get("status") == "success":
                break
            await patience.wait(str(data.get("status", data)))
        patience.done()
        first_time = self.env_id is None
        self.env_id = data["env_id"]
        self._evaluations_taken = True
        self.wandb_prepend = data["wandb_name"]
        self.checkpoint_dir = data["checkpoint_dir"]
        self.checkpoint_interval = data["checkpoint_interval"]
        self._trainer_steps = data["num_steps"]
        if first_time:
            self.curr_step = data["starting_step"]
            if self.curr_step > 0 and not self.config.exact_resume:  # there the service says which item comes next
                self.load_checkpoint()
        logger.info("registered as %s (id %s), training to step %s", self.wandb_prepend, self.env_id, self._last_step())

    def _patience_for_trainer(self) -> Patience:
        return Patience(
            f"a trainer at {self.config.rollout_server_url}",
            self.config.service_timeout,
            ServiceUnavailable,
            logger,
            "start one, for example `python -u example_trainer/grpo.py --model-name …`",
        )

    async def get_server_info(self) -> None:
        """Take over the trainer's batch size and longest sequence.

        Raises:
            EnvironmentFailure: a group does not fit into a batch.
        """
        info = await self.service.get("/info")
        if info.get("batch_size", -1) != -1:
            self.config.batch_size = info["batch_size"]
        if info.get("max_token_len", -1) != -1:
            self.max_token_len = info["max_token_len"]
        if 0 < self.config.batch_size < self.config.group_size:
            raise EnvironmentFailure(
                f"--env.group_size {self.config.group_size} does not fit into the trainer's batch of "
                f"{self.config.batch_size} sequences: lower it, or raise the trainer's batch"
            )
        for server in self.server.servers:
            if isinstance(server, APIServer) and self.max_token_len > 0:
                server.max_sequence_length = self.max_token_len - 1

    async def get_status(self) -> None:
        """Ask for the queue's state; a service that was started anew knows us no more, so register again."""
        patience: Patience | None = None
        while True:
            assert self.env_id is not None
            try:
                status = await self.service.status_env(self.env_id)
            except RejectedByService as rejection:
                status = {"status": str(rejection)}
            if "current_step" in status:
                break
            why = f"does not know environment {self.env_id} ({status})"
            logger.warning("the rollout service %s: registering again", why)
            if patience is None:
                patience = self._patience_for_trainer()
            else:
                await patience.wait(why)
            await self.register_env()
            await self.get_server_info()
        if status["current_step"] < self.curr_step:
            logger.info("the trainer went back from step %d to %d", self.curr_step, status["current_step"])
            await self.get_server_info()
        self.status_dict = status
        self._heed_position(status)
        await self.server.update_weight(status.get("env_weight", 1.0))

    def _last_step(self) -> int:
        """The step after which there is nothing left to do; -1 when neither the trainer nor the configuration says."""
        return min((step for step in (self.config.total_steps, self._trainer_steps) if step > 0), default=-1)

    def _training_is_over(self) -> bool:
        """Whether there is nothing more to do, as of the status asked for last.

        That the last batch was handed out does not end the run: until the trainer says that it has, it may come back from a
        checkpoint and ask for batches again.
        """
        status, last = self.status_dict, self._last_step()
        if status.get("run_ended"):
            return True
        if not 0 < last <= status["current_step"]:
            self._handed_out = None
            return False
        if last == self.config.total_steps or "run_ended" not in status:
            return True  # our own limit, or a service that does not tell of the run's end
        if self._handed_out is None:
            logger.info("every batch up to step %d is handed out: waiting for the trainer to end the run", last)
        if self._handed_out is None or self._handed_out[0] != status["current_step"]:
            # Beyond its last step, too: a trainer may have come back to do more steps than it first said.
            self._handed_out = status["current_step"], time.monotonic()
        if time.monotonic() - self._handed_out[1] < self.config.service_timeout:
            return False
        logger.warning("the trainer did not end the run within %g s (--env.service_timeout)", self.config.service_timeout)
        return True

    # ---- steps -----------------------------------------------------------------------------------------------------------

    async def env_step_checks(self) -> None:
        """When the trainer has moved on: evaluate, keep state and log, as far as each is due."""
        step = self.status_dict["current_step"]
        if step == self.curr_step:
            return
        previous, self.curr_step = self.curr_step, step
        every = self.config.steps_per_eval
        if every > 0 and crossed(previous, step, every):
            self._start_evaluation()
        if self.checkpoint_interval > 0 and crossed(previous, step, self.checkpoint_interval):
            self.save_checkpoint(step // self.checkpoint_interval * self.checkpoint_interval)
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            self.items_sent_this_step = 0
            await self.wandb_log({})

    def _start_evaluation(self) -> None:
        if self.eval_runner is not None and not self.eval_runner.done():
            logger.warning("the previous evaluation still runs: the one due at step %d is left out", self.curr_step)
            return
        logger.info("evaluating at step %d", self.curr_step)
        self.eval_runner = asyncio.create_task(self._recorded_evaluation())
        self.eval_runner.add_done_callback(self._evaluation_done)
        if self.config.eval_handling is EvalHandlingEnum.STOP_TRAIN:
            for item_id, running in list(self.running_items.items()):
                if not running["collected"]:  # what is sampled already asks nothing more of the servers
                    self._put_back(item_id)

    def _evaluation_done(self, task: asyncio.Task[Any]) -> None:
        if self.eval_runner is task:
            self.eval_runner = None  # with it goes all that the evaluation held on to
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the evaluation failed; training goes on", exc_info=error)
            if isinstance(error, EnvironmentFailure):
                self._fatal = error
        self._wake_up()

    async def _log_remaining(self) -> None:
        if self.eval_runner is not None and not self.eval_runner.done():
            logger.info("waiting for the evaluation that still runs")
            await asyncio.wait({self.eval_runner}, timeout=LAST_EVALUATION_SECONDS)
        await self.wandb_log({})

    async def _stop(self) -> None:
        """Cancel what runs, say goodbye, close files and connections."""
        tasks = self.workers | self.eval_workers | ({self.eval_runner} if self.eval_runner else set())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        if self._service is not None:
            if self.env_id is not None:
                await self._service.disconnect(self.env_id)
            await self._service.close()
        await self.close_servers()
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def crossed(previous: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (previous, now]: the trainer may move several steps between two looks."""
    return now // every > previous // every
