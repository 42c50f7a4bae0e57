"""`BaseEnv`: what an environment derives from. Subclass it, fill in four methods, and run the file:

class MyEnv(BaseEnv):
    async def setup(self): ...                       # load data
    async def get_next_item(self): ...               # one item
    async def collect_trajectories(self, item): ...  # a scored group for it
    async def evaluate(self): ...

if __name__ == "__main__":
    MyEnv.cli()                                      # serve (the default), process, evaluate
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum  # noqa: F401
from atroposlib.envs.runner import command_line
from atroposlib.envs.runner.delivery import Delivery
from atroposlib.envs.runner.processing import process
from atroposlib.envs.runner.reporting import Reports
from atroposlib.envs.runner.rollout import Rollouts
from atroposlib.envs.runner.serve import Serving
from atroposlib.envs.runner.servers import served_model_blocking, tokenizer_name, wait_for_servers
from atroposlib.envs.runner.workers import RunningItem
from atroposlib.errors import UsageError
from atroposlib.inference.client import APIServer, APIServerConfig, ReasoningConfig, ServerBaseline
from atroposlib.inference.server_manager import ServerManager
from atroposlib.inference.tokenizers import load_tokenizer
from atroposlib.service_client import RolloutServiceClient
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import JsonLinesWriter, unused_path
from atroposlib.web.keys import SERVICE_KEY, given_or_variable
from atroposlib.wire.groups import DropCounter, ScoredDataGroup, ScoredDataItem  # noqa: F401

# What is not used here is imported for environments, which find it here in the public SDK.

T = TypeVar("T")


class BaseEnv(ABC):
    """An environment: a client of the rollout service that turns items into scored groups.

    A subclass defines `setup`, `get_next_item`, `evaluate`, and `collect_trajectory` (one response)
    or `collect_trajectories` (a whole group). Everything else has a default that may be overridden.

    What is done by default is in four parts, a file of `runner` each: `_rollouts` (from an item to
    its groups), `_delivery` (from groups to the service), `_serving` (the life beside a trainer)
    and `_reports` (metrics and evaluations). They call the methods here, so an override holds
    everywhere. State that an environment may read or set is an attribute here.

    Args:
        config: the environment's settings.
        server_configs: the inference servers.
        slurm: find the servers on the nodes of this Slurm job.
        testing: answer from a table instead of servers.
    """

    name: str | None = None
    sends_chats: ClassVar[bool] = (
        False  # True: the tokenizer's chat template is checked before the first item
    )
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[type[APIServer]] = APIServer  # type: ignore[type-abstract]  # stands for "by server_type"

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ):
        # Typed as Any because a subclass's config has settings that this class does not know.
        self.config: Any = config
        self.server = ServerManager(
            server_configs,
            self.server_cls,
            slurm,
            testing,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        for server in self.server.servers:
            if isinstance(server, APIServer):
                server.pool.outage_timeout = config.service_timeout

        # Where the trainer is
        self.curr_step = 0
        self.status_dict: dict[str, Any] = {}
        self.env_id: int | None = None
        self.wandb_prepend: str | None = None
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.max_token_len = -1
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1

        # Items in work, and items to be done before new ones are asked for
        self.workers: set[asyncio.Task[Any]] = set()
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.eval_runner: asyncio.Task[Any] | None = None
        self.running_items: dict[str, RunningItem] = {}
        self.backlog: list[Item] = []
        self.last_completed_item: Item = None
        at_once = config.max_num_workers_per_node * len(self.server.servers)
        self.max_num_workers = config.max_num_workers if config.max_num_workers > 0 else at_once

        # What is counted and logged
        self.drops = DropCounter()
        self.items_sent_this_step = 0
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[int] = []

        # `process` only
        self.process_mode, self.n_groups_to_process, self.group_size_to_process = (
            False,
            0,
            config.group_size,
        )

        self._tokenizer: Any = None
        self._rollouts, self._delivery = Rollouts(self), Delivery(self)
        self._serving, self._reports = Serving(self), Reports(self)
        self.jsonl_writer: JsonLinesWriter | None = None
        if config.data_path_to_save_groups is not None:
            config.data_path_to_save_groups = str(
                unused_path(Path(config.data_path_to_save_groups))
            )
            self.jsonl_writer = JsonLinesWriter(config.data_path_to_save_groups)

    # ---- what an environment implements
    # -------------------------------------------------------------------------------

    @classmethod
    def config_init(
        cls,
    ) -> tuple[BaseEnvConfig, ServerBaseline | APIServerConfig | list[APIServerConfig]]:
        """The environment's own defaults; YAML and flags come on top."""
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        """Load data. Runs once, before anything else."""
        raise NotImplementedError(f"{type(self).__name__} must define setup()")

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item to roll out, or None when there is none for now."""

    async def next_item(self) -> Item:
        """The item to work on now: `get_next_item`'s, unless the environment chooses among those
        (`GradedEnv`).

        Raises:
            UsageError: a choice by success is wanted, and this environment does not say which
                answers are right.
        """
        if self.config.curriculum:
            raise UsageError(
                f"--env.curriculum: {type(self).__name__} does not say which answers are right: leave it out, or derive from "
                "SingleTurnEnv or MultiTurnEnv"
            )
        return await self.get_next_item()

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the model.

        Runs every `steps_per_eval` trainer steps, and for the `evaluate` command.
        """

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        """One response to an item, as a `ScoredDataItem`, and items for the backlog."""
        raise NotImplementedError(
            f"{type(self).__name__} must define collect_trajectory() or collect_trajectories()"
        )

    # ---- an item's way to the service: runner/rollout.py, then runner/delivery.py
    # --------------------------------

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """`group_size` responses to an item, each by `collect_trajectory`, as a group; and items
        for the backlog.

        A response that fails is tried again by itself, so that the others need not be made twice.
        Override this to make all responses with one request.

        Raises:
            RolloutFailure: a response failed every time, or was given up by the environment (None).
        """
        return await self._rollouts.collect_one_by_one(item)

    def sampling_seed(self, request: int = 0) -> int | None:
        """The `seed` of a request for the item in work; None, which leaves it to the server,
        without `seed_rollouts`.

        Args:
            request: its number among the item's requests. One request for several responses has a
                seed for each: the server counts on from this one.

        Raises:
            RuntimeError: no item is in work here, as in an evaluation.
        """
        return self._rollouts.seed(request)

    async def retried(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run it, and again up to `rollout_retries` times when it raises.

        Raises:
            RolloutFailure: it raised every time; each traceback is in the log.
        """
        return await self._rollouts.retried(what, call)

    async def item_at(self, number: int) -> Item:
        """The item of that number, counted from 0, or None when there is none for now. With
        `exact_resume` only.

        By default they are what `get_next_item` gives after `setup`, which runs again for a number
        that lies behind. An environment that can jump to an item overrides this.
        """
        return await self._serving.workers.item_by_counting(number)

    async def postprocess_histories(
        self, trajectories: ScoredDataGroup | list[ScoredDataGroup | None] | None
    ) -> ScoredDataGroup | list[ScoredDataGroup | None] | None:
        """Change the groups of one item before they are sent."""
        return trajectories

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> int:
        """Check groups, keep them in the groups file, and post them. Returns how many passed the
        check.

        Args:
            scored_data: a group, or a list of groups of which some may be None.
            item: what they answer, for logging.
            do_send_to_api: False to keep them only.
            abort_on_any_max_length_exceeded: drop groups with a sequence longer than the trainer
                takes.

        Raises:
            RolloutFailure: the teacher refused all that there was.
            EnvironmentFailure: the teacher or the service was away for too long.
        """
        return await self._delivery.deliver(
            scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded
        )

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Post one group or a list of groups; waits and retries while the service is away or full."""
        await self._delivery.post(scored_data)

    async def cleanup(self) -> None:  # noqa: B027 (optional)
        """Runs after every item."""

    # ---- serving: runner/serve.py, runner/workers.py
    # ------------------------------------------------------------

    @cached_property
    def service(self) -> RolloutServiceClient:
        """The connection to the rollout service, made on first use."""
        config = self.config
        key = given_or_variable(config.rollout_server_api_key, SERVICE_KEY)
        return RolloutServiceClient(config.rollout_server_url, config.service_timeout, key)

    async def env_manager(self) -> None:
        """Serve until the trainer is done.

        Raises:
            EnvironmentFailure: something that only a person can mend; the message says what.
        """
        await self._serving.serve()

    async def wait_for_servers(self) -> None:
        """Return once the inference servers answer, and the teacher if there is one.

        Override it where there are none.
        """
        await wait_for_servers(self)

    async def setup_wandb(self) -> None:
        """Start a W&B run in the trainer's project and group."""
        await self._serving.setup_wandb()

    async def register_env(self) -> None:
        """Register, waiting for the trainer as long as `service_timeout` allows."""
        await self._serving.register()

    async def get_server_info(self) -> None:
        """Take over the trainer's batch size and longest sequence.

        Raises:
            EnvironmentFailure: a group does not fit into a batch.
        """
        await self._serving.get_info()

    async def get_status(self) -> None:
        """Ask for the queue's state; a service that was started anew knows us no more, so register
        again.
        """
        await self._serving.get_status()

    async def env_step_checks(self) -> None:
        """When the trainer has moved on: evaluate, keep state and log, as far as each is due."""
        await self._serving.after_a_step()

    def load_checkpoint(self) -> None:
        """Set the attributes that `save_checkpoint` kept at the current step, if there is a file."""
        self._serving.load_state()

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Keep `data` (attribute -> value) for `load_checkpoint`.

        A subclass calls this with what it wants kept.
        """
        self._serving.keep_state(step, data)

    @property
    def derived_batch_size(self) -> int:
        """Sequences per batch that this environment may fill: what is not reserved, and its own
        reserve.
        """
        return self._serving.workers.batch_share()

    async def add_train_workers(self) -> None:
        """Start workers up to the number allowed: the backlog first, then new items."""
        await self._serving.workers.add()

    async def handle_env(self, item_uuid: str) -> Any:
        """One item from start to end. Returns its groups, or None when there are none.

        Raises:
            EnvironmentFailure: something that only a person can mend; what is wrong with one item
                ends that item only.
        """
        return await self._serving.workers.work(item_uuid)

    async def process_manager(self) -> None:
        """Make `n_groups_to_process` groups, `max_num_workers` at a time, and write them to
        `data_path_to_save_groups`.

        Raises:
            EnvironmentFailure: too many items in a row failed.
        """
        await process(self)

    # ---- what is told: runner/reporting.py
    # --------------------------------------------------------------------------

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log metrics to the log, to `metrics_path` and to W&B.

        A subclass overrides this, adds its own metrics, and calls
        `await super().wandb_log(metrics)`.
        """
        await self._reports.log(dict(wandb_metrics or {}) | self._delivery.teaching.metrics())

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Durations in seconds, added to the metrics; the collected values are then forgotten."""
        return self._reports.add_durations(metrics_dict)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Keep some rollouts of a group for the table in W&B."""
        self._reports.keep_rollouts(scored_data)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as a table."""
        return self._reports.add_table(wandb_metrics)

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Report an evaluation: a table in the terminal, files where a path is set, and to the
        rollout service, which tells the trainer.

        `data_dir_to_save_evals` gets `metrics.json` and `samples.jsonl`; `eval_output` gets the
        metrics as JSON, with the samples as JSON lines next to it.

        Args:
            metrics: name -> value. The service gets those that are numbers.
            start_time: Unix time in seconds, as `end_time`.
            samples: one dict per problem.
        """
        about = task_name, model_name, start_time, end_time, generation_parameters
        await self._reports.evaluation(metrics, *about, samples, verbose)

    # ---- tokenizer
    # ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `--env.tokenizer_name`, or of the model that the inference server
        serves.
        """
        if self._tokenizer is None:
            self.tokenizer = load_tokenizer(tokenizer_name(self) or served_model_blocking(self))
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value
        for server in self.server.servers:
            if getattr(server, "tokenizer", self) is None:
                server.tokenizer = value

    # ---- the command line: runner/command_line.py
    # -------------------------------------------------------------------

    @classmethod
    def cli(cls) -> None:
        """Run the command line and leave the process with its exit code."""
        raise SystemExit(command_line.main(cls))

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[BaseModel]:
        """A model with every flag as a field (`{"env.group_size": 8}`), whose `run()` runs the
        command.
        """
        return command_line.config_class(cls, "serve")

    @classmethod
    def get_cli_process_config_cls(cls) -> type[BaseModel]:
        """The same for `process`."""
        return command_line.config_class(cls, "process")

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[BaseModel]:
        """The same for `evaluate`."""
        return command_line.config_class(cls, "evaluate")
