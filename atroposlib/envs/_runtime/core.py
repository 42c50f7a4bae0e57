"""The state that every environment has, and the hooks that a subclass fills in."""

import asyncio
import json
import logging
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import httpx

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.errors import InferenceUnavailable
from atroposlib.groups import DropCounter, ScoredDataGroup
from atroposlib.inference.openai_server import OpenAIRoutes, OpenAIServer
from atroposlib.inference.reasoning import ReasoningConfig
from atroposlib.inference.server_baseline import (
    MODEL_NOT_NAMED,
    APIServer,
    APIServerConfig,
    ServerBaseline,
)
from atroposlib.inference.server_manager import ServerManager
from atroposlib.inference.tokenizers import load_tokenizer
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import JsonLinesWriter, unused_path
from atroposlib.utils.keys import bearer
from atroposlib.utils.waiting import Patience

logger = logging.getLogger(__name__)


class EnvironmentCore(ABC):
    """Construction, tokenizer, checkpoints, and the hooks.

    Args:
        config: the environment's settings.
        server_configs: the inference servers.
        slurm: find the servers on the nodes of this Slurm job.
        testing: answer from a table instead of servers.
    """

    name: str | None = None
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
            slurm=slurm,
            testing=testing,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        for server in self.server.servers:
            if isinstance(server, APIServer):
                server.gate.outage_timeout = config.service_timeout

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
        self.running_items: dict[str, dict[str, Any]] = {}
        self.backlog: list[Item] = []
        self.items_begun = 0
        self.last_completed_item: Item = None
        nodes = len(self.server.servers)
        per_node = config.max_num_workers_per_node
        self.max_num_workers = config.max_num_workers if config.max_num_workers > 0 else per_node * nodes

        # What is counted and logged
        self.drops = DropCounter()
        self.items_sent_this_step = 0
        self.groups_sent = 0
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[int] = []
        self.last_loop_time: float | None = None

        # `process` only
        self.process_mode = False
        self.n_groups_to_process = 0
        self.group_size_to_process = config.group_size

        self._tokenizer: Any = None
        self.jsonl_writer: JsonLinesWriter | None = None
        if config.data_path_to_save_groups is not None:
            config.data_path_to_save_groups = str(unused_path(Path(config.data_path_to_save_groups)))
            self.jsonl_writer = JsonLinesWriter(config.data_path_to_save_groups)

    # ---- what an environment implements -------------------------------------------------------------------------------

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | APIServerConfig | list[APIServerConfig]]:
        """The environment's own defaults; YAML and flags come on top."""
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        """Load data. Runs once, before anything else."""
        raise NotImplementedError(f"{type(self).__name__} must define setup()")

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item to roll out, or None when there is none for now."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the model. Runs every `steps_per_eval` trainer steps, and for the `evaluate` command."""

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        """One response to an item, as a `ScoredDataItem`, and items for the backlog."""
        raise NotImplementedError(f"{type(self).__name__} must define collect_trajectory() or collect_trajectories()")

    async def postprocess_histories(
        self, trajectories: ScoredDataGroup | list[ScoredDataGroup | None] | None
    ) -> ScoredDataGroup | list[ScoredDataGroup | None] | None:
        """Change the groups of one item before they are sent."""
        return trajectories

    async def cleanup(self) -> None:  # noqa: B027 (optional)
        """Runs after every item."""

    # ---- checkpoints of the environment's own state -------------------------------------------------------------------

    def _checkpoint_path(self, step: int) -> Path:
        return Path(self.checkpoint_dir) / "env_checkpoints" / (self.wandb_prepend or "env") / f"step-{step}.json"

    def load_checkpoint(self) -> None:
        """Set the attributes that `save_checkpoint` kept at the current step, if there is a file."""
        path = self._checkpoint_path(self.curr_step)
        if path.exists():
            for key, value in json.loads(path.read_text()).items():
                setattr(self, key, value)
            logger.info("resumed from %s", path)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Keep `data` (attribute -> value) for `load_checkpoint`. A subclass calls this with what it wants kept."""
        if data is None:
            return
        path = self._checkpoint_path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data))
        os.replace(partial, path)
        logger.info("kept the environment's state of step %d in %s", step, path)

    # ---- tokenizer ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `--env.tokenizer_name`, or of the model that the inference server serves."""
        if self._tokenizer is None:
            self.tokenizer = load_tokenizer(self._tokenizer_name() or self._served_model_blocking())
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value
        for server in self.server.servers:
            if getattr(server, "tokenizer", self) is None:
                server.tokenizer = value

    def _tokenizer_name(self) -> str | None:
        """The tokenizer that a flag or the configuration names, or None for the served model's."""
        of_server = getattr(getattr(self.server.servers[0], "config", None), "tokenizer_name", None)
        return self.config.tokenizer_name or (None if of_server in MODEL_NOT_NAMED else of_server)

    def _served_model_blocking(self) -> str:
        """Ask the inference server for its model; waits for the server as long as `service_timeout` allows."""
        server = self.server.servers[0]
        if server.config.model_name not in MODEL_NOT_NAMED:
            return server.config.model_name
        patience = Patience(
            f"inference server at {server.root_url}",
            self.config.service_timeout,
            InferenceUnavailable,
            logger,
            "start it, or pass --openai.base_url or --env.tokenizer_name",
        )
        while True:
            server = self.server.pick()
            try:
                response = httpx.get(
                    f"{server.root_url}/v1/models",
                    headers=bearer(server.api_key),
                    timeout=10.0,
                    trust_env=server.honours_proxies,
                )
                response.raise_for_status()
                return response.json()["data"][0]["id"]
            except (httpx.HTTPError, LookupError, ValueError) as error:
                patience.wait_blocking(f"/v1/models names no model ({type(error).__name__})")

    async def wait_for_inference(self) -> None:
        """Wait until an inference server answers, and load the tokenizer."""
        await self.server.wait_until_well()
        name, server = self._tokenizer_name(), self.server.pick()
        # An endpoint that gives text only may serve a model whose tokenizer nobody can have: load it when it is used.
        if name is None and isinstance(server, OpenAIRoutes) and not isinstance(server, OpenAIServer):
            try:
                name = await server.model()
            except httpx.HTTPError as error:
                raise InferenceUnavailable(
                    f"inference server at {server.root_url}: /v1/models failed ({error}); pass --env.tokenizer_name"
                ) from error
        if name is not None and self._tokenizer is None:
            # Loading takes seconds: not in the event loop, where a signal to stop would have to wait for it.
            self.tokenizer = await asyncio.to_thread(load_tokenizer, name)
