"""The life of an environment that serves: set up, register, keep workers busy, evaluate when due,
stop after training.
"""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.envs.config import EvalHandlingEnum
from atroposlib.envs.runner.servers import close_servers
from atroposlib.envs.runner.workers import Workers
from atroposlib.errors import EnvironmentFailure, ServiceUnavailable
from atroposlib.inference.client import APIServer
from atroposlib.service_client import RejectedByService
from atroposlib.utils.jsonl import replace_file
from atroposlib.utils.waiting import Patience

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often the service is asked for the queue's state when nothing else happens; a finished worker
asks at once. Where there is no worker, the answer comes as soon as the trainer does something."""

MIN_POLL_SECONDS = 0.05

LAST_EVALUATION_SECONDS = 120.0
"""How long an evaluation may still run after training is over; the inference server may be stopped
at any moment then."""


class Serving:
    """`serve` runs the whole life cycle."""

    def __init__(self, env: "BaseEnv"):
        self.env = env
        self.workers = Workers(env)
        self.trainer_steps = -1
        self._last_round: float | None = None
        self._handed_out: tuple[int, float] | None = None
        """When every step was handed out: the step that was reached, and since when nothing has
        moved."""

    async def serve(self) -> None:
        """See `BaseEnv.env_manager`."""
        env = self.env
        try:
            await env.setup()
            await env.wait_for_servers()
            await env.setup_wandb()
            await env.register_env()
            await env.get_server_info()
            while not await self.one_round():
                await self._rest()
            logger.info("the trainer reached step %d: done (%s dropped)", env.curr_step, env.drops)
            await self._log_remaining()
        finally:
            await self._stop()

    async def one_round(self) -> bool:
        """Ask for the state, start what is due. True when training is over."""
        env, now = self.env, time.monotonic()
        if self._last_round is not None:
            env.mainloop_timings.append(now - self._last_round)
        self._last_round = now
        if env.server.follower is not None and env.config.max_num_workers <= 0:
            env.max_num_workers = env.config.max_num_workers_per_node * len(env.server.servers)
        self.workers.busy_when_asked = len(env.workers)
        await env.get_status()
        self.workers.check_health()
        await env.env_step_checks()
        if self._training_is_over():
            return True
        await env.add_train_workers()
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
        """Return whether nothing happens here before the trainer does something, and the service
        tells of that.
        """
        return (
            not self.env.workers
            and self.env.eval_runner is None
            and "moves" in self.env.status_dict
        )

    # ---- the service
    # ---------------------------------------------------------------------------------------------------

    async def setup_wandb(self) -> None:
        """Start a W&B run in the trainer's project and group."""
        if not self.env.config.use_wandb:
            return
        patience = self._patience_for_trainer()
        while True:
            info = await self.env.service.get("/wandb_info")
            if info.get("project") is not None:
                break
            await patience.wait("has no trainer registered")
        self.env.wandb_project, self.env.wandb_group = info["project"], info["group"]
        self.env._reports.start_wandb(self.env.wandb_project, self.env.wandb_group)

    async def _post_registration(self) -> dict[str, Any]:
        return await self.env.service.post(
            "/register-env",
            {
                "max_token_length": self.env.config.max_token_length,
                "desired_name": self.env._reports.label,
                "weight": self.env.config.inference_weight,
                "min_batch_allocation": self.env.config.min_batch_allocation,
                "group_size": self.env.config.group_size,
                **({"stream": self.workers.stream} if self.env.config.exact_resume else {}),
            },
        )

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
        first_time = self.env.env_id is None
        self.env.env_id = data["env_id"]
        self.env._reports.evaluations_taken = True
        self.env.wandb_prepend = data["wandb_name"]
        self.env.checkpoint_dir = data["checkpoint_dir"]
        self.env.checkpoint_interval = data["checkpoint_interval"]
        self.trainer_steps = data["num_steps"]
        if first_time:
            self.env.curr_step = data["starting_step"]
            if (
                self.env.curr_step > 0 and not self.env.config.exact_resume
            ):  # there the service says which item comes next
                self.env.load_checkpoint()
        logger.info(
            "registered as %s (id %s), training to step %s",
            self.env.wandb_prepend,
            self.env.env_id,
            self._last_step(),
        )

    def _patience_for_trainer(self) -> Patience:
        return Patience(
            f"a trainer at {self.env.config.rollout_server_url}",
            self.env.config.service_timeout,
            ServiceUnavailable,
            logger,
            "start one, for example `python -u example_trainer/grpo.py --model-name …`",
        )

    async def get_info(self) -> None:
        """See `BaseEnv.get_server_info`."""
        info = await self.env.service.get("/info")
        if info.get("batch_size", -1) != -1:
            self.env.config.batch_size = info["batch_size"]
        if info.get("max_token_len", -1) != -1:
            self.env.max_token_len = info["max_token_len"]
        if 0 < self.env.config.batch_size < self.env.config.group_size:
            raise EnvironmentFailure(
                f"--env.group_size {self.env.config.group_size} does not fit into the trainer's batch of "
                f"{self.env.config.batch_size} sequences: lower it, or raise the trainer's batch"
            )
        for server in self.env.server.servers:
            if isinstance(server, APIServer) and self.env.max_token_len > 0:
                server.max_sequence_length = self.env.max_token_len - 1

    async def get_status(self) -> None:
        """Ask for the queue's state. Register again with a service that has lost this environment.

        If every batch of the run had been handed out, such a service has begun another run, and
        this environment ends.
        """
        patience: Patience | None = None
        while True:
            assert self.env.env_id is not None
            known = (
                (self.env.status_dict["moves"], POLL_SECONDS)
                if patience is None and self._idle()
                else ()
            )
            try:
                status = await self.env.service.status_env(self.env.env_id, *known)
            except RejectedByService as rejection:
                status = {"status": str(rejection)}
            if "current_step" in status:
                break
            why = f"does not know environment {self.env.env_id} ({status})"
            if self._handed_out is not None:
                logger.info(
                    "the rollout service %s, and every batch of the run was handed out: the run is over",
                    why,
                )
                self.env.status_dict = self.env.status_dict | {"run_ended": True}
                return
            logger.warning("the rollout service %s: registering again", why)
            if patience is None:
                patience = self._patience_for_trainer()
            else:
                await patience.wait(why)
            await self.env.register_env()
            await self.env.get_server_info()
        if status["current_step"] < self.env.curr_step:
            logger.info(
                "the trainer went back from step %d to %d",
                self.env.curr_step,
                status["current_step"],
            )
            await self.env.get_server_info()
        self.env.status_dict = status
        self.workers.heed_position(status)
        await self.env.server.update_weight(status.get("env_weight", 1.0))

    def _last_step(self) -> int:
        """The step after which there is nothing left to do; -1 when neither the trainer nor the
        configuration says.
        """
        return min(
            (step for step in (self.env.config.total_steps, self.trainer_steps) if step > 0),
            default=-1,
        )

    def _training_is_over(self) -> bool:
        """Return whether there is nothing more to do, as of the status asked for last.

        That the last batch was handed out does not end the run: until the trainer says that it has,
        it may come back from a checkpoint and ask for batches again.
        """
        status, last = self.env.status_dict, self._last_step()
        if status.get("run_ended"):
            return True
        if not 0 < last <= status["current_step"]:
            self._handed_out = None
            return False
        if last == self.env.config.total_steps or "run_ended" not in status:
            return True  # our own limit, or a service that does not tell of the run's end
        if self._handed_out is None:
            logger.info(
                "every batch up to step %d is handed out: waiting for the trainer to end the run",
                last,
            )
        if self._handed_out is None or self._handed_out[0] != status["current_step"]:
            # Beyond its last step, too: a trainer may have come back to do more steps than it first
            # said.
            self._handed_out = status["current_step"], time.monotonic()
        if time.monotonic() - self._handed_out[1] < self.env.config.service_timeout:
            return False
        logger.warning(
            "the trainer did not end the run within %g s (--env.service_timeout)",
            self.env.config.service_timeout,
        )
        return True

    # ---- steps
    # -----------------------------------------------------------------------------------------------------------

    async def after_a_step(self) -> None:
        """When the trainer has moved on: evaluate, keep state and log, as far as each is due."""
        step = self.env.status_dict["current_step"]
        if step == self.env.curr_step:
            return
        previous, self.env.curr_step = self.env.curr_step, step
        every = self.env.config.steps_per_eval
        if every > 0 and crossed(previous, step, every):
            self.start_evaluation()
        if self.env.checkpoint_interval > 0 and crossed(
            previous, step, self.env.checkpoint_interval
        ):
            self.env.save_checkpoint(
                step // self.env.checkpoint_interval * self.env.checkpoint_interval
            )
        if self.env.items_sent_this_step >= self.env.config.min_items_sent_before_logging:
            self.env.items_sent_this_step = 0
            await self.env.wandb_log({})

    def start_evaluation(self) -> None:
        if self.env.eval_runner is not None and not self.env.eval_runner.done():
            logger.warning(
                "the previous evaluation still runs: the one due at step %d is left out",
                self.env.curr_step,
            )
            return
        logger.info("evaluating at step %d", self.env.curr_step)
        self.env.eval_runner = asyncio.create_task(self.env._reports.recorded_evaluation())
        self.env.eval_runner.add_done_callback(self._evaluation_done)
        if self.env.config.eval_handling is EvalHandlingEnum.STOP_TRAIN:
            for item_id, running in list(self.env.running_items.items()):
                if (
                    not running.collected
                ):  # what is sampled already asks nothing more of the servers
                    self.workers.put_back(item_id)

    def _evaluation_done(self, task: asyncio.Task[Any]) -> None:
        if self.env.eval_runner is task:
            self.env.eval_runner = None  # with it goes all that the evaluation held on to
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the evaluation failed; training goes on", exc_info=error)
            if isinstance(error, EnvironmentFailure):
                self.workers.fatal = error
        self.workers.wake.set()

    def _state_path(self, step: int) -> Path:
        env = self.env
        return (
            Path(env.checkpoint_dir)
            / "env_checkpoints"
            / (env.wandb_prepend or "env")
            / f"step-{step}.json"
        )

    def load_state(self) -> None:
        """See `BaseEnv.load_checkpoint`."""
        path = self._state_path(self.env.curr_step)
        if path.exists():
            for key, value in json.loads(path.read_text()).items():
                setattr(self.env, key, value)
            logger.info("resumed from %s", path)

    def keep_state(self, step: int, data: dict[str, Any] | None) -> None:
        """See `BaseEnv.save_checkpoint`."""
        if data is None:
            return
        path = self._state_path(step)
        replace_file(path, json.dumps(data).encode())
        logger.info("kept the environment's state of step %d in %s", step, path)

    async def _log_remaining(self) -> None:
        if self.env.eval_runner is not None and not self.env.eval_runner.done():
            logger.info("waiting for the evaluation that still runs")
            await asyncio.wait({self.env.eval_runner}, timeout=LAST_EVALUATION_SECONDS)
        await self.env.wandb_log({})

    async def _stop(self) -> None:
        """Cancel what runs, say goodbye, close files and connections."""
        env = self.env
        tasks = env.workers | env.eval_workers | ({env.eval_runner} if env.eval_runner else set())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        if env.env_id is not None:
            await env.service.disconnect(env.env_id)
        await env.service.close()
        await close_servers(env)
        env._reports.close()


def crossed(previous: int, now: int, every: int) -> bool:
    """Return whether a multiple of `every` lies in (previous, now]: the trainer may move several
    steps between two looks.
    """
    return now // every > previous // every
