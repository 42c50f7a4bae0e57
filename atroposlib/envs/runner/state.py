"""The state of a run and its connections to the servers around it, which all parts of the runner
share."""

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.runner.exact_resume import ItemPosition
from atroposlib.errors import InferenceUnavailable
from atroposlib.inference.chat_template import load_tokenizer, require_chat_template
from atroposlib.inference.client import (
    MODEL_NOT_NAMED,
    APIServer,
    OpenAIRoutes,
    OpenAIServer,
    describe,
    status_of,
)
from atroposlib.inference.server_manager import ServerManager
from atroposlib.inference.teacher_client import TeacherServer
from atroposlib.service_client import RolloutServiceClient
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import JsonLinesWriter
from atroposlib.utils.waiting import Patience
from atroposlib.web.keys import SERVICE_KEY, VLLM_KEY, bearer, given_or_variable
from atroposlib.wire import DropCounter

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv as Author
else:
    Author = Any
"""The environment, whose methods the parts call: an override holds wherever they are called."""


@dataclass
class RunningItem:
    """An item in work.

    Attributes:
        item: the result of `get_next_item`.
        worker: the task that works on it.
        position: its position in the order of items, with `exact_resume`.
        collected: True once all its responses are sampled, so that it needs no inference server any
            more.
    """

    item: Item
    worker: asyncio.Task[Any]
    position: ItemPosition | None
    collected: bool = False


class RunState:
    """Configuration, progress, items in work and counters of one environment's run."""

    def __init__(self, config: BaseEnvConfig, servers: int) -> None:
        # Typed as Any because a subclass's config has settings that this class does not know.
        self.config: Any = config

        # The trainer's progress, and this environment's registration
        self.curr_step = 0
        self.status_dict: dict[str, Any] = {}
        self.env_id: int | None = None
        self.wandb_prepend: str | None = None
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.max_token_len = -1
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1

        # Items in work, and items to be done before `get_next_item` is called
        self.workers: set[asyncio.Task[Any]] = set()
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.eval_runner: asyncio.Task[Any] | None = None
        self.running_items: dict[str, RunningItem] = {}
        self.backlog: list[Item] = []
        self.max_num_workers = config.max_num_workers
        if self.max_num_workers <= 0:
            self.max_num_workers = config.max_num_workers_per_node * servers

        # Counters, and values for the next metrics
        self.drops = DropCounter()
        self.groups_sent = 0
        self.items_sent_this_step = 0
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self.timings: defaultdict[str, list[float]] = defaultdict(list)
        self.jsonl_writer: JsonLinesWriter | None = None

        self.process_mode = False


def label_of(author: Author, config: BaseEnvConfig) -> str:
    """Return the environment's name for the service and W&B."""
    return config.wandb_name or author.name or type(author).__name__


logger = logging.getLogger(__name__)


class Connections:
    """Clients of the servers around an environment, and their tokenizer.

    Args:
        state: the run; its configuration has the addresses.
        author: the environment.
        server: the inference servers.
    """

    def __init__(self, state: RunState, author: Author, server: ServerManager):
        self.state, self.author, self.server = state, author, server
        self.loaded_tokenizer: Any = None
        """None until the tokenizer is needed."""
        self.more_servers: list[ServerManager] = []
        """Other servers of the environment, closed with it."""
        for each in server.servers:
            if isinstance(each, APIServer):
                each.pool.outage_timeout = state.config.service_timeout

    @cached_property
    def service(self) -> RolloutServiceClient:
        """The connection to the rollout service, made on first use."""
        config = self.state.config
        key = given_or_variable(config.rollout_server_api_key, SERVICE_KEY)
        return RolloutServiceClient(config.rollout_server_url, config.service_timeout, key)

    @cached_property
    def teacher(self) -> TeacherServer | None:
        """The connection to the teacher of `--env.teacher_url`, made on first use; None without one."""
        config = self.state.config
        if not config.teacher_url:
            return None
        return TeacherServer(
            config.teacher_url,
            config.teacher_model_name,
            given_or_variable(config.teacher_api_key, None),
            config.teacher_timeout,
            config.teacher_max_requests,
        )

    # ---- tokenizer
    # ----------------------------------------------------------------------------------------------------

    def tokenizer(self) -> Any:
        """Return the tokenizer, loaded on first use."""
        if self.loaded_tokenizer is None:
            self.use_tokenizer(load_tokenizer(self._tokenizer_name() or self.served_model()))
        return self.loaded_tokenizer

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Use this tokenizer, here and in servers that have none."""
        self.loaded_tokenizer = tokenizer
        for server in self.server.servers:
            if getattr(server, "tokenizer", self) is None:
                server.tokenizer = tokenizer

    def _tokenizer_name(self) -> str | None:
        """The tokenizer that a flag or the configuration names, or None for the served model's."""
        of_server = getattr(getattr(self.server.servers[0], "config", None), "tokenizer_name", None)
        named = None if of_server in MODEL_NOT_NAMED else of_server
        return self.state.config.tokenizer_name or named

    def served_model(self) -> str:
        """Ask the inference server for its model. Blocks until the server answers, for
        `service_timeout` at most.
        """
        server = self.server.servers[0]
        if server.config.model_name not in MODEL_NOT_NAMED:
            return server.config.model_name
        patience = Patience(
            f"inference server at {server.root_url}",
            self.state.config.service_timeout,
            InferenceUnavailable,
            logger,
            "start it, or pass --openai.base_url or --env.tokenizer_name",
        )
        while True:
            server = self.server.pick()
            try:
                response = httpx.get(
                    f"{server.openai_url}/models",
                    headers=bearer(server.api_key),
                    timeout=10.0,
                    trust_env=server.honours_proxies,
                )
                response.raise_for_status()
                return response.json()["data"][0]["id"]
            except (httpx.HTTPError, LookupError, ValueError) as error:
                patience.wait_blocking(
                    f"{server.openai_url}/models names no model ({type(error).__name__})"
                )

    # ---- waiting and closing
    # ------------------------------------------------------------------------------------------

    async def wait_for_inference(self) -> None:
        """Wait until an inference server answers, and load the tokenizer."""
        await self.server.wait_until_well()
        name, server = self._tokenizer_name(), self.server.pick()
        # An endpoint that gives text only may serve a model whose tokenizer cannot be downloaded:
        # load it when it is used.
        text_only = isinstance(server, OpenAIServer)
        if name is None and isinstance(server, OpenAIRoutes) and not text_only:
            try:
                name = await server.model()
            except httpx.HTTPError as error:
                remedy = "pass --env.tokenizer_name"
                if status_of(error) in (401, 403):
                    remedy = f"give its key as --openai.api_key or, of a vLLM server, as {VLLM_KEY}"
                raise InferenceUnavailable(
                    f"inference server at {server.root_url}: /v1/models failed ({describe(error)}); {remedy}"
                ) from error
        if name is not None and self.loaded_tokenizer is None:
            # Loading takes seconds: not in the event loop, where a signal to stop would have to
            # wait for it.
            self.use_tokenizer(await asyncio.to_thread(load_tokenizer, name))
        if self.loaded_tokenizer is not None and self.author.sends_chats:
            require_chat_template(self.loaded_tokenizer)

    async def wait_for_teacher(self) -> None:
        """Wait until the teacher answers, if there is one, and check that its tokens are ours.

        Raises:
            EnvironmentFailure: it does not come, has another vocabulary, or does not score.
        """
        if self.teacher is not None:
            self.teacher.tokenizer = self.loaded_tokenizer or await asyncio.to_thread(
                lambda: self.author.tokenizer
            )
            await self.teacher.start()
            logger.info("teacher at %s: same vocabulary, it scores", self.teacher.root_url)

    async def close(self) -> None:
        """Close the connections to inference servers and teacher."""
        for manager in (self.server, *self.more_servers):
            await manager.close()
        # The teacher is forgotten, so that a later use connects again.
        teacher = self.__dict__.pop("teacher", None)
        if teacher is not None:
            await teacher.close()
