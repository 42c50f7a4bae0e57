"""`BaseEnv`: what an environment derives from. Subclass it, fill in four methods, and run the file:

class MyEnv(BaseEnv):
    async def setup(self): ...                       # load data
    async def get_next_item(self): ...               # one item
    async def collect_trajectories(self, item): ...  # a scored group for it
    async def evaluate(self): ...

if __name__ == "__main__":
    MyEnv.cli()                                      # serve (the default), process, evaluate
"""

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.groups import ScoredDataGroup, ScoredDataItem
from atroposlib.envs.processing import ProcessingMixin
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_manager import (
    APIServer,
    APIServerConfig,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
)
from atroposlib.envs.serving import ServingMixin
from atroposlib.type_definitions import UUID, Item, Message

__all__ = [
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
        from atroposlib.envs.cli import main

        raise SystemExit(main(cls))
