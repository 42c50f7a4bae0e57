"""The state of a run that the runner's parts share."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.runner.exact_resume import ItemPosition
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import JsonLinesWriter
from atroposlib.wire import DropCounter

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv as Author
else:
    Author = Any
"""The environment, whose methods the parts call: an override holds wherever they are called."""

T = TypeVar("T")


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

    def mark_collected(self) -> None:
        """Record that all responses are sampled."""
        self.collected = True


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

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
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


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and anything else as a list of one entry."""
    if isinstance(value, list):
        return value
    return [value]


async def take_item(state: RunState, author: Author) -> Item:
    """Return the item to begin now: of the backlog, else a new one."""
    if state.backlog:
        return state.backlog.pop()
    return await author.next_item()


def label_of(author: Author, config: BaseEnvConfig) -> str:
    """Return the environment's name for the service and W&B."""
    return config.wandb_name or author.name or type(author).__name__
