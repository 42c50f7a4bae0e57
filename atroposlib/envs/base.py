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
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum  # noqa: F401
from atroposlib.envs.runner import command_line
from atroposlib.envs.runner.runner import Runner
from atroposlib.errors import UsageError
from atroposlib.inference.client import APIServer, APIServerConfig, ReasoningConfig, ServerBaseline
from atroposlib.inference.server_manager import ServerManager
from atroposlib.type_definitions import Item
from atroposlib.utils.waiting import awaited
from atroposlib.wire import DropCounter, ScoredDataGroup, ScoredDataItem  # noqa: F401

# Imports that this file does not use are for environments: the public SDK has them here.

T = TypeVar("T")


class View(Generic[T]):
    """An attribute of an environment that shows an attribute of a part of its runner.

    Before `BaseEnv.__init__` it is an ordinary attribute, which `__init__` then hides.

    Args:
        part: the runner's part, such as `state`.
    """

    def __init__(self, part: str) -> None:
        self.part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # of the class, not of an environment
        if (runner := instance.__dict__.get("_runner")) is not None:
            return getattr(getattr(runner, self.part), self.name)
        if self.name not in instance.__dict__:
            raise AttributeError(
                f"{owner.__name__}.{self.name} is set by BaseEnv.__init__: call super().__init__() first"
            )
        return instance.__dict__[self.name]

    def __set__(self, instance: object, value: T) -> None:
        if (runner := instance.__dict__.get("_runner")) is not None:
            setattr(getattr(runner, self.part), self.name, value)
        else:
            instance.__dict__[self.name] = value


class BaseEnv(ABC):
    """An environment: a client of the rollout service that turns items into scored groups.

    A subclass defines `setup`, `get_next_item`, `evaluate`, and `collect_trajectory` (one response)
    or `collect_trajectories` (a whole group). Everything else has a default that may be overridden.

    The defaults are in the parts of `runner.Runner`. They call the methods here, so an override
    holds everywhere.

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

    # The run's state, which a subclass may read or set
    config = View[Any]("state")
    server = View[ServerManager]("connections")
    loaded_tokenizer = View[Any]("connections")  # None until `tokenizer` is used
    curr_step = View[int]("state")
    status_dict = View[dict[str, Any]]("state")
    wandb_prepend = View[str | None]("state")
    max_token_len = View[int]("state")
    checkpoint_dir = View[str]("state")
    workers = View[set[asyncio.Task[Any]]]("state")
    max_num_workers = View[int]("state")
    drops = View[DropCounter]("state")
    items_sent_this_step = View[int]("state")
    completion_lengths = View[list[int]]("state")
    rollouts_for_wandb = View[list[list[tuple[str, float]]]]("state")
    process_mode = View[bool]("state")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Drop a subclass's own defaults of the run's state, which `__init__` replaces anyway."""
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if isinstance(getattr(BaseEnv, name, None), View) and not isinstance(value, property):
                delattr(cls, name)

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ):
        reasoning = ReasoningConfig.from_env_config(config)
        server = ServerManager(
            server_configs, self.server_cls, slurm, testing, reasoning_config=reasoning
        )
        self._runner = Runner(self, config, server)

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
            UsageError: the settings require a choice by success, and this environment does not
                report right answers.
        """
        if self.config.curriculum:
            raise UsageError(
                f"--env.curriculum: {type(self).__name__} does not mark right answers: leave it "
                "out, or derive from "
                "SingleTurnEnv or MultiTurnEnv"
            )
        return await awaited(self.get_next_item(), "get_next_item", self)

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the model.

        Runs every `steps_per_eval` trainer steps, and for the `evaluate` command, which fails if
        this returns an empty dict.
        """

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        """One response to an item, as a `ScoredDataItem`, and items for the backlog."""
        raise NotImplementedError(
            f"{type(self).__name__} must define collect_trajectory() or collect_trajectories()"
        )

    # ---- an item's way to the service: runner/items.py
    # --------------------------------

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """`group_size` responses to an item, each by `collect_trajectory`, as a group; and items
        for the backlog.

        A response that fails is tried again by itself, so that the others need not be made twice.
        Override this to make all responses with one request.

        Raises:
            RolloutFailure: a response failed every time, or was given up by the environment (None).
        """
        return await self._runner.rollouts.collect_one_by_one(item)

    def sampling_seed(self, request: int = 0) -> int | None:
        """The `seed` of a request for the item in work; None, which leaves it to the server,
        without `seed_rollouts`.

        Args:
            request: its number among the item's requests. One request for several responses has a
                seed for each: the server counts on from this one.

        Raises:
            RuntimeError: no item is in work here, as in an evaluation.
        """
        return self._runner.rollouts.seed(request)

    async def retried(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run it, and again up to `rollout_retries` times when it raises.

        Raises:
            RolloutFailure: it raised every time; each traceback is in the log.
        """
        return await self._runner.rollouts.retried(what, call)

    async def item_at(self, number: int) -> Item:
        """The item of that number, counted from 0, or None when there is none for now. With
        `exact_resume` only.

        By default they are what `get_next_item` gives after `setup`, which runs again for a number
        that lies behind. An environment that can jump to an item overrides this.
        """
        return await self._runner.workers.item_by_counting(number)

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
            scored_data: a group, or a list of groups and None.
            item: what they answer, for logging.
            do_send_to_api: False to keep them only.
            abort_on_any_max_length_exceeded: drop groups with a sequence longer than the trainer
                takes.

        Raises:
            RolloutFailure: the teacher refused all that there was.
            EnvironmentFailure: the teacher or the service was away for too long.
        """
        return await self._runner.delivery.deliver(
            scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded
        )

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Post one group or a list of groups; waits and retries while the service is away or full."""
        await self._runner.delivery.post(scored_data)

    async def cleanup(self) -> None:  # noqa: B027 (optional)
        """Runs after every item."""

    # ---- serving: runner/runner.py, runner/items.py
    # ------------------------------------------------------------

    async def env_manager(self) -> None:
        """Serve until the trainer is done.

        Raises:
            EnvironmentFailure: a fault that only a person can mend; the message names it.
        """
        await self._runner.serve()

    async def wait_for_servers(self) -> None:
        """Return once the inference servers answer, and the teacher if there is one.

        Override it where there are none.
        """
        await self._runner.connections.wait_for_inference()
        await self._runner.connections.wait_for_teacher()

    async def setup_wandb(self) -> None:
        """Start a W&B run in the trainer's project and group."""
        await self._runner.setup_wandb()

    async def register_env(self) -> None:
        """Register, waiting for the trainer as long as `service_timeout` allows."""
        await self._runner.register()

    async def get_server_info(self) -> None:
        """Take over the trainer's batch size and longest sequence.

        Raises:
            EnvironmentFailure: a group does not fit into a batch.
        """
        await self._runner.get_info()

    async def get_status(self) -> None:
        """Get the queue's state. Register again with a service that was restarted without its store."""
        await self._runner.get_status()

    async def env_step_checks(self) -> None:
        """Evaluate, keep state and log after a step of the trainer, as far as each is due."""
        await self._runner.after_a_step()

    def load_checkpoint(self) -> None:
        """Set the attributes that `save_checkpoint` kept at the current step, if there is a file."""
        self._runner.load_state()

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Keep `data` (attribute -> value) for `load_checkpoint`.

        A subclass calls this with what it wants kept.
        """
        self._runner.keep_state(step, data)

    @property
    def derived_batch_size(self) -> int:
        """Sequences of a batch that this environment may fill: the unreserved share and its own."""
        size, reserved = self.config.batch_size, self.config.min_batch_allocation or 0.0
        if size <= 0:
            return size
        return int(size * min(1.0, self.status_dict.get("unallocated_fraction", 1.0) + reserved))

    async def add_train_workers(self) -> None:
        """Start workers up to the number allowed: the backlog first, then new items."""
        await self._runner.workers.add()

    async def handle_env(self, item_uuid: str) -> Any:
        """One item from start to end. Returns its groups, or None when there are none.

        Raises:
            EnvironmentFailure: something that only a person can mend; what is wrong with one item
                ends that item only.
        """
        return await self._runner.workers.work(item_uuid)

    async def process_manager(self) -> None:
        """Make `total_steps` groups, `max_num_workers` at a time, and write them to
        `data_path_to_save_groups`.

        Raises:
            EnvironmentFailure: too many items in a row failed, or no group was made.
        """
        await self._runner.process()

    # ---- reports: runner/reporting.py
    # --------------------------------------------------------------------------

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log metrics to the log, to `metrics_path` and to W&B.

        A subclass overrides this, adds its own metrics, and calls
        `await super().wandb_log(metrics)`.
        """
        await self._runner.reports.log(
            dict(wandb_metrics or {}) | self._runner.delivery.teacher_metrics()
        )

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Durations in seconds, added to the metrics; the collected values are then forgotten."""
        return self._runner.reports.add_durations(metrics_dict)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Keep some rollouts of a group for the table in W&B."""
        if self._runner.reports.wandb is not None:
            self._runner.reports.keep_rollouts(scored_data)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as a table."""
        return self._runner.reports.add_table(wandb_metrics)

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
        rollout service, which passes it to the trainer.

        `data_dir_to_save_evals` gets `metrics.json` and `samples.jsonl`; `eval_output` gets the
        metrics as JSON, with the samples as JSON lines next to it.

        Args:
            metrics: name -> value. The service gets the numbers among them.
            start_time: Unix time in seconds, as `end_time`.
            samples: one dict per problem.
        """
        about = task_name, model_name, start_time, end_time, generation_parameters
        await self._runner.reports.evaluation(metrics, *about, samples, verbose)

    # ---- tokenizer
    # ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `--env.tokenizer_name`, or of the model that the inference server
        serves.
        """
        loaded = self.loaded_tokenizer
        return self._runner.connections.tokenizer() if loaded is None else loaded

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._runner.connections.use_tokenizer(value)

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
