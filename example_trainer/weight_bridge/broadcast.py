"""Two copies of the weights: the trainer sends its own to every rank of every server at the same
time.

An update is: all servers begin, the weights are streamed once for each layout, all commit. Rank 0
    alone speaks with the servers and decides (fleet_updates.py). It sends its decisions to the
    other ranks, so that all act alike. A server that fails is excluded, and the version is sent
    again to the rest. A server that comes back gets one full update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from example_trainer.errors import BridgeError, ConfigError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.base import SyncReport, WeightBridge, Weights
from example_trainer.weight_bridge.checkpoint_sources import frozen_sources
from example_trainer.weight_bridge.fleet import Fleet, not_good, table
from example_trainer.weight_bridge.fleet_updates import (
    LOOK_SECONDS,
    Board,
    FleetKeeper,
    FleetUpdates,
    GroupMember,
    Member,
    UpdateGroup,
    Watch,
    call_all,
)
from example_trainer.weight_bridge.server import (
    BridgeServer,
    ParameterServer,
    Shapes,
    as_held,
    as_served,
    manifests_of,
    require_finite,
    require_layout,
    served_dtype,
    shapes_of,
    timed,
)
from example_trainer.weight_bridge.stream import (
    ROUTE_KEYS,
    Cohort,
    Rendezvous,
    SendPlan,
    WeightStream,
    distinct_layouts,
    route_to,
)
from vllm_patching.protocol.manifest import Manifest, dtype_name
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.rendezvous import Meeting
from vllm_patching.transport.shared_memory import gpu_uuid

logger = logging.getLogger(__name__)

SERVER_PATIENCE = 10.0


class Line:
    """The sender for one layout of servers: the stream that packs it, and the cohort that gets it.

    Attributes:
        formed: the members of the cohort as it is; empty if there is none.
        key: its name.
    """

    def __init__(self, stream: WeightStream, cohort: Cohort, route: Route) -> None:
        self.stream, self.cohort, self.route = stream, cohort, route
        self.formed: tuple[GroupMember, ...] = ()
        self.key = ""

    def leave(self) -> None:
        """Close the cohort; it has to be formed again."""
        self.formed, self.key = (), ""
        self.cohort.close()


class BroadcastBridge(WeightBridge):
    """Sends to each rank of each server the shard that it holds, rounded to the server's dtype."""

    converts = True

    def __init__(
        self,
        servers: BridgeServer | Sequence[BridgeServer],
        transfer: str = "auto",
        ranks: Ranks | None = None,
        *,
        least: int = 1,
        patience: float = SERVER_PATIENCE,
        hosts: int = 0,
        make_server: Callable[[str], BridgeServer] | None = None,
        board: Board | None = None,
        port: int | None = None,
    ) -> None:
        """
        Args:
            servers: one or several that serve the same model; none where `least` is 0 and others
                join.
            transfer: `direct` into the live weights of a paused server. `overlapped`, beside them
                while it generates. `auto` overlaps where the server's GPUs have room for a second
                copy.
            ranks: the trainer's processes, if it has several.
            least: servers without which training waits; 0: no server is ever waited for, not at the
                beginning either.
            patience: seconds for which one server may keep the others waiting.
            hosts: so many machines must have a server when training begins; 0: any number.
            make_server: speaks to a server that joins later, by its address.
            board: shows the fleet's table, and returns the servers that are to join or leave.
            port: where the servers meet this process; 0: any that is free; None: the environment's
                MASTER_PORT.
        """
        self._ranks = ranks or Ranks()
        given = [servers] if isinstance(servers, BridgeServer) else list(servers)
        # The first server, or any address, gives the deadlines.
        first = next(iter(given), None) or _required(make_server)("http://localhost:1")
        members = {server.url: Member(server) for server in given}
        make = make_server or (lambda url: _same_kind(first, url))
        if make_server is None:
            least = min(least, len(members))
        fleet = Fleet(members, least, patience, time.monotonic())
        if not self._ranks.is_main:  # the other ranks call no server
            board = None
        self._keeper = FleetKeeper(fleet, members, make, board)
        self._updates = FleetUpdates(
            self._keeper, transfer, first.timeout, first.startup_timeout, first.sleep, hosts
        )
        # Looking for servers, joining them, forming, beginning, committing and calling off, each
        # with its margin.
        self._longest = first.startup_timeout + 2 * first.longest_wait + 3 * patience
        self._timeout = first.timeout
        self._meeting_seconds = min(first.timeout, 2 * patience)
        self._manifests: dict[str, tuple[Manifest, ...]] = {}
        self._places: list[dict[str, Any]] = []
        self._model: torch.nn.Module | None = None
        self._shapes: Shapes = {}
        self._device = torch.device("cpu")
        self._rendezvous = Rendezvous(self._ranks, self._timeout, port)
        self._lines: dict[str, Line] = {}
        self._version = 0

    def serving_dtype(self) -> torch.dtype | None:
        def gather() -> list[Any]:
            present = self._updates.gather()
            dtype = dtype_name(served_dtype(present[0].info))
            places = [{key: member.info[key] for key in ROUTE_KEYS} for member in present]
            return [
                dtype,
                [[manifest.to_json() for manifest in member.manifests] for member in present],
                places,
            ]

        dtype, found, self._places = self._ranks.on_main(
            "asking the vLLM servers", gather, self._longest
        )
        for ranks in found:
            manifests = tuple(Manifest.from_json(rank) for rank in ranks)
            self._manifests[",".join(manifest.digest() for manifest in manifests)] = manifests
        return getattr(torch, dtype)

    def layouts(self) -> tuple[tuple[Manifest, ...], ...]:
        return distinct_layouts(self._manifests.values())

    def require_shapes(self, shapes: Shapes) -> None:
        for manifests in self._manifests.values():
            held = as_held(shapes, manifests, self.may_lack)
            require_layout(manifests, as_served(held, manifests[0].entries[0].torch_dtype))

    def packs(self, device: torch.device) -> bool:
        own = [gpu_uuid(device)] * self._ranks.world_size
        return any(route_to(place, own) is not Route.NCCL for place in self._places)

    def connect(self, model: torch.nn.Module) -> None:
        self._model, self._shapes = model, shapes_of(model)
        self._device = next(model.parameters()).device
        if geometry := getattr(model, "geometry", None):
            self.may_lack = frozen_sources(geometry)
        manifests = [manifest for ranks in self._manifests.values() for manifest in ranks]
        self.params_total = len(as_held(self._shapes, manifests, self.may_lack))
        # Here and now, so that a port that is taken ends the start, not the first update.
        self._ranks.on_main("opening the rendezvous", self._open_store)
        own = self._ranks.gather(gpu_uuid(self._device), "naming the GPUs")

        def prepare() -> list[int]:
            self._updates.prepare(self._as_sent, own)
            return [self._updates.joins, self._updates.mapped]

        self.joins, self.params_mapped = self._ranks.on_main(
            "joining the vLLM servers", prepare, self._longest
        )

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        """See WeightBridge.sync.

        The model's weights are this process's own, so they are written before any server pauses.
        """
        seconds: dict[str, float] = {}
        with timed(seconds, "write"):
            write_weights()
        self._version = version
        done = self._deliver(True, seconds)
        facts = ("checksum", "bytes_moved", "first_byte_to_verified", "server_seconds", "fleet")
        return SyncReport(version=version, seconds=seconds, **{name: done[name] for name in facts})

    def offer(self, version: int, weight_epoch: int) -> None:
        """The parameters of the model given to `connect` hold other weights now, perhaps in other
        memory: what `sync` and `keep_serving` send from here on. Nothing is sent. Collective.

        Args:
            version, weight_epoch: of them. With another epoch servers are joined again.
        """
        for line in self._lines.values():
            line.stream.rebind()
        self._version = version
        if self._ranks.is_main:
            self._keeper.change_epoch(weight_epoch)

    def require(self, check: Callable[[str, dict[str, Any]], None]) -> None:
        self._updates.require(lambda member: check(member.url, member.info))

    def require_kernels(
        self, kernels: Mapping[str, str], check: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._updates.kernels = kernels
        self.require(check)

    def server_urls(self) -> list[str]:
        with self._keeper.lock:
            return list(self._keeper.fleet.good)

    def fleet_table(self) -> list[dict[str, Any]]:
        """The servers and how they stand, on rank 0."""
        with self._keeper.lock:
            return table(self._keeper.fleet)

    def infos(self) -> dict[str, dict[str, Any]]:
        """Return what /bridge/info of every server answers at once, by address in the order of the
        fleet, on rank 0. Servers without a good answer are left out. Any thread may call this.
        """
        with self._keeper.lock:
            servers = [member.server for member in self._keeper.members.values()]
        looks = {one.url: partial(one.look, "/bridge/info", LOOK_SECONDS) for one in servers}
        answers = call_all(looks, LOOK_SECONDS + 1.0).ok
        return {url: info for url in looks if (info := answers.get(url)) is not None}

    def server_restarted(self) -> bool:
        return bool(self._keeper.due())

    def server_trouble(self) -> str:
        with self._keeper.lock:
            return not_good(self._keeper.fleet)

    def keep_serving(self, write_weights: Callable[[], None]) -> None:
        """See WeightBridge.keep_serving. The model's weights are the present ones already."""

        def due() -> list[str]:
            self._keeper.look()
            return self._keeper.due()

        if self._ranks.on_main("looking for servers that are back", due, self._longest):
            self._deliver(False, {})

    def close(self) -> None:
        self._keeper.close()
        for line in self._lines.values():
            line.leave()
        for member in self._keeper.members.values():
            member.server.close()

    # ---- one update, on every rank ----

    def _deliver(self, everyone: bool, seconds: dict[str, float]) -> dict[str, Any]:
        """Bring the present version to all servers, or to those alone that do not serve it and
        could. Returns what was done.
        """
        version, main = self._version, self._ranks.on_main
        with self._keeper.updating() if self._ranks.is_main else nullcontext():
            main("beginning an update", lambda: self._updates.begin_version(version, everyone))

            def choose() -> list[dict[str, Any]]:
                return [group.model_dump(mode="json") for group in self._updates.choose()]

            while True:
                with timed(seconds, "choose"):
                    groups = main("choosing the servers", choose, self._longest)
                for group in groups:
                    self._send(UpdateGroup.model_validate(group), seconds)
                if main("looking who has the weights", self._updates.settled):
                    break
            done = main("ending an update", self._updates.report)
        self.joins, self.params_mapped = done["joins"], done["mapped"]
        return done

    def _send(self, group: UpdateGroup, seconds: dict[str, float]) -> None:
        """One try to update a group of servers.

        Who got it, and who is to blame if it broke, is known on rank 0 then.
        """
        updates, main, limit = self._updates, self._ranks.on_main, self._longest
        line = self._line(group)
        with timed(seconds, "checksum"):
            spoilt = line.stream.not_finite()
        require_finite(spoilt, self._version)
        watch = updates.watch(group) if self._ranks.is_main else None
        try:
            with watch or nullcontext():
                if line.formed != group.members:
                    with timed(seconds, "form"):
                        self._form(line, group, watch)
                with timed(seconds, "begin"):
                    main(
                        "beginning on vLLM",
                        lambda: updates.begin(group, line.key, _here(watch)),
                        limit,
                    )
                begun = time.perf_counter()
                with timed(seconds, "transfer"):
                    checksums = line.stream.send(line.cohort, _lost(watch))
                with timed(seconds, "commit"):
                    main(
                        "committing on vLLM",
                        lambda: updates.commit(group, checksums, begun, _here(watch)),
                        limit,
                    )
        except BridgeError as error:
            line.leave()
            broken = error
            main(
                "calling the update off",
                lambda: updates.break_off(group, broken, _here(watch)),
                limit,
            )

    def _form(self, line: Line, group: UpdateGroup, watch: Watch | None) -> None:
        """Have the members meet."""
        line.leave()
        lanes = line.cohort.plan.lanes

        def call_together() -> list[Any]:
            meeting = self._rendezvous.open(group.urls)
            self._updates.call_together(group, meeting, lanes, _here(watch))
            return [meeting.host, meeting.port, meeting.secret]

        meeting = Meeting(
            *self._ranks.on_main("calling vLLM's ranks together", call_together, self._longest)
        )
        store = self._ranks.together(
            "joining the rendezvous", lambda: self._rendezvous.join(meeting), self._timeout
        )
        line.cohort.form(
            meeting,
            group.key,
            group.receivers,
            line.route,
            store,
            self._meeting_seconds,
            _lost(watch),
        )
        line.formed, line.key = group.members, group.key

    def _open_store(self) -> None:
        """On rank 0. Nothing is returned: a meeting, with its secret, does not go to other ranks."""
        self._rendezvous.open(list(self._keeper.members))

    def _line(self, group: UpdateGroup) -> Line:
        """Return the line of a group's layout; a new layout gets a new line."""
        assert self._model is not None
        if group.layout not in self._lines:
            manifests = [Manifest.from_json(rank) for rank in group.manifests]
            plan = SendPlan(self._ranks.world_size, len(manifests))
            stream = WeightStream(
                self._model, manifests, plan, self._ranks, self._device, group.route
            )
            cohort = Cohort(self._ranks, plan, self._device, self._timeout, stream.memory)
            self._lines[group.layout] = Line(stream, cohort, group.route)
        return self._lines[group.layout]

    def _as_sent(self, info: dict[str, Any]) -> Shapes:
        """Return the parameters that the server of this /bridge/info has, in its dtype."""
        held = as_held(self._shapes, manifests_of(info), self.may_lack)
        return as_served(held, served_dtype(info))


def _lost(watch: Watch | None) -> Callable[[], str]:
    """Return a function that gives the reason to stop waiting; only rank 0 knows it."""
    return watch.lost if watch is not None else str


def _here(watch: Watch | None) -> Watch:
    assert watch is not None, "rank 0 alone speaks with the servers"
    return watch


def _required(make: Callable[[str], BridgeServer] | None) -> Callable[[str], BridgeServer]:
    assert make is not None, "without servers there must be a way to servers that join"
    return make


def _same_kind(server: BridgeServer, url: str) -> BridgeServer:
    raise BridgeError(
        f"{url} cannot join what was started for {server.url} and the servers named beside it; name it, too, at the next start"
    )


class ParameterServerBridge(BroadcastBridge):
    """Pushes to all parameter servers at once.

    Parameter servers decide which vLLM servers get the weights, and when.
    """

    handing_over = "push"

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        ranks: Ranks | None,
        least: int,
        patience: float,
        push_every: int,
        last: int,
        max_staleness: int | None,
    ) -> None:
        """
        Args:
            servers, ranks, least, patience: see BroadcastBridge; parameter servers in place of
                vLLM's.
            push_every: steps from one push to the next.
            last: step that is pushed in any case.
            max_staleness: oldest rollouts that are trained on, by versions; None: any.
        """
        super().__init__(servers, "overlapped", ranks, least=least, patience=patience)
        self._every, self._last, self._pushed = push_every, last, -1

        def check(url: str, info: dict[str, Any]) -> None:
            require_fresh_enough(url, int(info.get("pull_every", 1)), push_every, max_staleness)

        self.require(check)

    def require_kernels(
        self, kernels: Mapping[str, str], check: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Have the parameter servers check their vLLM servers."""
        self._updates.kernels = kernels

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        """See WeightBridge.sync. Between two pushes the weights are written and nothing else; the
        report has the version that was pushed last. A parameter server that is back gets the
        present ones.
        """
        if self._pushed >= 0 and version % self._every and version != self._last:
            write_weights()
            self._version = version
            return SyncReport(version=self._pushed, checksum="", bytes_moved=0)
        report = super().sync(version, write_weights, masters)
        self._pushed = version
        return report


def require_fresh_enough(
    url: str, pull_every: int, push_every: int, max_staleness: int | None
) -> None:
    """Refuse a parameter server whose vLLM servers would sample with weights that are too old for
    the trainer, for ever.

    They get every version that is pushed, or where --pull-every is more than --push-every, the
    first one that is so much newer.

    Raises:
        ConfigError: the message names the change that helps.
    """
    behind = -(-pull_every // push_every) * push_every - 1
    if max_staleness is not None and max_staleness < behind:
        raise ConfigError(
            f"{url} was started with --pull-every {pull_every}: with --push-every {push_every} "
            f"vLLM servers are up to {behind} versions behind. A --max-staleness of "
            f"{max_staleness} would wait for newer rollouts for ever. Give at least {behind}, or "
            "lower the others"
        )
