"""`BaseEnv`: what an environment derives from. Subclass it, fill in four methods, and run the file:

class MyEnv(BaseEnv):
    async def setup(self): ...                       # load data
    async def get_next_item(self): ...               # one item
    async def collect_trajectories(self, item): ...  # a scored group for it
    async def evaluate(self): ...

if __name__ == "__main__":
    MyEnv.cli()                                      # serve (the default), process, evaluate
"""

from pydantic import BaseModel

from atroposlib.envs._runtime.processing import ProcessingMixin
from atroposlib.envs._runtime.serving import ServingMixin
from atroposlib.envs.config import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE, BaseEnvConfig, EvalHandlingEnum
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.groups import ScoredDataGroup, ScoredDataItem
from atroposlib.inference.openai_server import OpenAIServer, resolve_openai_configs
from atroposlib.inference.server_manager import (
    APIServer,
    APIServerConfig,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
)
from atroposlib.type_definitions import UUID, Item, Message
from atroposlib.utils.cli import extract_namespace, get_double_dash_flags, get_prefixed_pydantic_model, merge_dicts
from atroposlib.utils.io import parse_http_response
from atroposlib.utils.metrics import get_std_min_max_avg

__all__ = [
    "ENV_NAMESPACE",
    "NAMESPACE_SEP",
    "OPENAI_NAMESPACE",
    "UUID",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenAIServer",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "extract_namespace",
    "generate_html",
    "get_double_dash_flags",
    "get_prefixed_pydantic_model",
    "get_std_min_max_avg",
    "merge_dicts",
    "parse_http_response",
    "resolve_openai_configs",
]


class BaseEnv(ServingMixin, ProcessingMixin):
    """An environment: a client of the rollout service that turns items into scored groups.

    A subclass defines `setup`, `get_next_item`, `evaluate`, and `collect_trajectory` (one response) or
    `collect_trajectories` (a whole group). Everything else has a default that may be overridden: `config_init`,
    `postprocess_histories`, `wandb_log`, `save_checkpoint`, `load_checkpoint`, `cleanup`.
    """

    @classmethod
    def cli(cls) -> None:
        """Run the command line and leave the process with its exit code."""
        from atroposlib.envs._runtime.command_line import main

        raise SystemExit(main(cls))

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[BaseModel]:
        """A model with every flag of `serve` as a field (`{"env.group_size": 8}`), whose `run()` runs the command."""
        return cls._config_class("serve")

    @classmethod
    def get_cli_process_config_cls(cls) -> type[BaseModel]:
        """The same for `process`."""
        return cls._config_class("process")

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[BaseModel]:
        """The same for `evaluate`."""
        return cls._config_class("evaluate")

    @classmethod
    def _config_class(cls, command: str) -> type[BaseModel]:
        from atroposlib.envs._runtime.command_line import config_class

        return config_class(cls, command)
