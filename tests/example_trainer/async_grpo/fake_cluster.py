"""A cluster, its actors and a clock that tests control."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from example_trainer.async_grpo.actor import Address, Launch, Look, NodeProblem, NodeReport
from example_trainer.async_grpo.cluster import SeatLost, SeatSilent
from example_trainer.async_grpo.driver import Driver
from example_trainer.async_grpo.restarts import Keeper, State
from example_trainer.async_grpo.roles import Demand, Node, Role
from example_trainer.async_grpo.service import Silences
from example_trainer.async_grpo.settings import make_settings

KEYS = {"ROLLOUT_API_KEY": "r", "VLLM_API_KEY": "v"}


class Answer:
    def __init__(self, value: Any, done: Callable[[], bool] = lambda: True) -> None:
        self.value, self.done = value, done

    def get(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class FakeSeat:
    """An actor of the test: it answers with what the test sets."""

    def __init__(self, cluster: FakeCluster, role: Role) -> None:
        self.cluster, self.role, self.begun = cluster, role, 0.0
        self.launch: Launch | None = None
        self.code: int | None = None
        self.lost = self.silent = self.killed = self.stopped = False
        self.busy = self.hung = False

    def ask(self, method: str, *arguments: Any) -> Answer:
        if self.silent:
            return Answer(SeatSilent("no answer"))
        if self.lost:
            return Answer(SeatLost("the actor died"))
        if method == self.cluster.broken.get(self.role.name):
            return Answer(
                NodeProblem("its log cannot be written: No space left on device; free space there")
            )
        if method == "check":
            wanted = arguments[0].wanted or self.cluster.ports(self.role.ports)
            problems, earlier = (
                self.cluster.problems.get(self.role.name, ()),
                self.cluster.earlier.get(self.role.name, ()),
            )
            self.cluster.ended_by_force |= {self.role.name} if arguments[0].end_earlier else set()
            report = NodeReport("host", wanted, (), self.cluster.common, problems, earlier)
            return Answer(report, lambda: self.role.name not in self.cluster.homeless)
        if method == "start":
            self.launch, self.begun = arguments[0], self.cluster.now
            self.cluster.order.append(self.role.name)
            return Answer(1)
        if method == "stop":
            self.stopped = True
            self.cluster.stopped.append(self.role.name)
            return Answer(0, lambda: not self.busy)
        ready = self.role.name not in self.cluster.slow
        lived = self.cluster.now - self.begun
        look = Look(
            ready,
            "" if ready else "GET: refused",
            self.code,
            lived,
            f"exited with code {self.code}: why",
            b"",
            1,
        )
        return Answer(look, lambda: not self.hung)

    def node(self) -> str:
        return self.cluster.node_of.get(self.role.group, "n1")

    def kill(self) -> None:
        self.killed = True


class FakeCluster:
    version = "2"

    def __init__(self) -> None:
        self.now, self.next_port = 0.0, 7000
        self.seats: dict[str, FakeSeat] = {}
        self.order: list[str] = []
        self.stopped: list[str] = []
        self.groups: list[Demand] = []
        self.problems: dict[str, tuple[str, ...]] = {}
        self.broken: dict[str, str] = {}
        self.earlier: dict[str, tuple[int, ...]] = {}
        self.ended_by_force: set[str] = set()
        self.slow: set[str] = set()
        self.homeless: set[str] = set()
        self.node_of: dict[str, str] = {}
        self.common, self.closed = True, False
        self.free = {"CPU": 64.0, "GPU": 8.0, "node:here": 1.0}

    def ports(self, count: int) -> tuple[int, ...]:
        self.next_port += count
        return tuple(range(self.next_port - count, self.next_port))

    def nodes(self) -> list[Node]:
        return [Node("node here", dict(self.free))]

    def host(self, node: str) -> str:
        return "localhost" if len(set(self.node_of.values())) < 2 else node

    def home(self) -> str:
        return "node:here"

    def lives(self, node: str) -> bool:
        return True

    def reserve(self, demand: Demand) -> None:
        self.groups.append(demand)

    def seat(self, role: Role, folder: str, life: int) -> FakeSeat:
        self.seats[role.name] = made = FakeSeat(self, role)
        return made

    def close(self) -> None:
        self.closed = True


class FakeFleet:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

        self.known: list[list[str] | None] = []

    def moved(self, before: Address, now: Address) -> None:
        self.told.append((before.server, now.server))

    def tell(self, service: Address, servers: Collection[str] | None) -> None:
        self.known.append(None if servers is None else list(servers))


class FakeSilences(Silences):
    """Polls no role: tests set when a role was active last."""

    def watch(self, keepers: Iterable[Keeper]) -> None:
        """See Silences."""

    def was_active(self, role: str, at: float) -> None:
        self._active[role] = at


class Bench:
    """A driver, and what turns its hands."""

    def __init__(self, folder: Path, **orchestration: Any) -> None:
        values = {
            "training": {"model_name": "m"},
            "logging": {"folder": str(folder)},
            "orchestration": orchestration,
        }
        self.cluster, self.fleet = FakeCluster(), FakeFleet()
        settings = make_settings(values, Path("x.yaml"))
        self.silences = FakeSilences("r", lambda: self.cluster.now)
        ways: dict[str, Any] = {"clock": lambda: self.cluster.now, "sleep": self.sleep}
        self.driver = Driver(settings, self.cluster, KEYS, self.fleet, self.silences, **ways)

    def sleep(self, seconds: float) -> None:
        self.cluster.now += seconds

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.driver.tick()
            self.cluster.now += 0.5

    def state(self, name: str) -> State:
        return self.driver.keepers[name].state
