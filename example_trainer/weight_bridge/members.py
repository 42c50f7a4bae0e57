"""The servers of a fleet as rank 0 of the trainer meets them: each has its own state, and all are
watched at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from example_trainer.errors import BridgeError, TrainerError
from example_trainer.vllm_client import ServerSilent
from example_trainer.weight_bridge.asking import Late, RunningClock, at_once
from example_trainer.weight_bridge.fleet import Laggards, Progress, Sight
from example_trainer.weight_bridge.send_plan import route_to
from example_trainer.weight_bridge.server import BridgeServer, Shapes, check_layout, manifests_of
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.protocol.messages import Route

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""For the answer to a look at a server's state."""
_FIRST_LOOK_SECONDS = 1.0
"""An update that takes no longer than this is not watched."""
_NEXT_LOOK_SECONDS = 0.5
_SAY_EVERY_SECONDS = 10.0


class Unfit(BridgeError):
    """A server that cannot be a member however often it is asked: only another server at its
    address can.
    """


class Member:
    """One server, and what this trainer has agreed with it.

    Attributes:
        server: speaks its routes.
        info: what /bridge/info answered last.
        manifests: of its ranks.
        epoch: of this trainer at that server; 0 before it has joined.
        joined: whether it takes steps of this trainer.
        transfer: how weights arrive, as the server chose.
        route: how they travel, as this process chose.
        replicas: engine cores behind it, each of which receives.
    """

    def __init__(self, server: BridgeServer) -> None:
        self.server = server
        self.info: dict[str, Any] = {}
        self.manifests: list[Manifest] = []
        self.epoch, self.replicas = 0, 1
        self.joined = False
        self.transfer = ""
        self.route = Route.GLOO

    @property
    def url(self) -> str:
        """Its address, which is its name in the fleet."""
        return self.server.url

    @property
    def instance(self) -> str:
        """Of the process that was asked for its layout last."""
        return str(self.info.get("instance", ""))

    @property
    def layout(self) -> str:
        """Servers with the same one can receive the same bytes at the same time."""
        return ",".join([self.route, *(manifest.digest() for manifest in self.manifests)])

    @property
    def num_bytes(self) -> int:
        """That an update brings it."""
        return self.replicas * sum(
            item.num_bytes for manifest in self.manifests for item in flat_layout(manifest)[0]
        )

    def ask(self) -> None:
        """What the server holds, into `info` and `manifests`; waits for a server that is still
        loading.
        """
        self.info = self.server.wait_for_info()
        self.manifests = manifests_of(self.info)

    def join(
        self,
        shapes: Callable[[dict[str, Any]], Shapes],
        transfer: str,
        gpus: Sequence[str],
        check: MemberCheck,
    ) -> int:
        """Begin an epoch with the server that answers now. Returns the number of parameters mapped,
        which is all of them.

        Args:
            shapes: what this trainer sends, by the server's info.
            transfer: auto, direct or overlapped.
            gpus: UUID of each trainer rank's GPU; empty on a CPU.
            check: raises if it must not be let in.

        Raises:
            Unfit: it holds something else, or cannot be sent to.
            BridgeError: it refuses now, or does not answer.
        """
        self.joined = False
        state = self.state()
        if state is None:
            raise ServerSilent(f"{self.url} does not answer")
        if state["instance"] != self.instance:
            self.ask()
        elif state["target_version"] is not None and state["epoch"] == self.epoch:
            self.server.abort(
                self.epoch, "the trainer joins anew"
            )  # else what is left of that update keeps it waiting
        told = shapes(self.info)
        try:
            mapped = check_layout(self.info, told)
        except BridgeError as error:
            raise Unfit(str(error)) from error
        try:
            check(self)
        except BridgeError:
            raise
        except TrainerError as error:
            raise Unfit(str(error)) from error
        answer = self.server.init("broadcast", told, transfer)
        self.epoch, self.transfer = answer["epoch"], answer["transfer"]
        self.route = route_to(self.info, gpus)
        self.replicas = int(answer.get("replicas", 1))
        self.joined = True
        return mapped

    def state(self) -> dict[str, Any] | None:
        """What the server says at once; None if it does not answer."""
        return self.server.look("/bridge/state", LOOK_SECONDS)

    def seen_in(self, state: dict[str, Any] | None) -> Sight | None:
        """What the fleet's policy wants to know of a server that answers this; None if it does not
        answer.
        """
        if state is None:
            return None
        ours = not self.joined or state["instance"] != self.instance or state["epoch"] == self.epoch
        hangs = str(state.get("engine_trouble", ""))
        trouble = "vLLM's engine process has died" if state["engine_dead"] else hangs
        if not trouble and not state["healthy"]:
            trouble = state.get("quarantine") or state["last_error"] or "is unhealthy"
        taken_by = "" if ours else taken_over(state)
        return Sight(
            state["instance"],
            state["weight_version"],
            state["weight_epoch"],
            trouble,
            taken_by,
            bool(hangs),
        )

    def broken(self, state: dict[str, Any] | None) -> str:
        """Why it will not finish the update that it is in; empty while it may."""
        if state is None:
            return ""
        if state["instance"] != self.instance:
            return "was restarted"
        if state["engine_dead"]:
            return "vLLM's engine process has died"
        if state.get("engine_trouble"):
            return str(state["engine_trouble"])
        return f"{taken_over(state)} has taken it over" if state["epoch"] != self.epoch else ""

    def waited_for_us(self, state: dict[str, Any] | None, version: int) -> str:
        """What a server says that has given this version up because nothing came from this trainer;
        empty if it has not.
        """
        if (
            state is None
            or self.broken(state)
            or state["target_version"] is not None
            or state.get("gave_up_waiting") != version
        ):
            return ""
        return f"gave version {version} up: {state['last_error']}"


MemberCheck = Callable[[Member], None]


def failures_of_ranks(state: Mapping[str, Any] | None) -> str:
    """What a server's ranks say of their own, such as a rendezvous that they cannot reach; empty if
    nothing.
    """
    return "; ".join(
        dict.fromkeys(rank["error"] for rank in (state or {}).get("ranks", []) if rank["error"])
    )


def holds_up(state: Mapping[str, Any] | None) -> bool:
    """Whether a server has a rank that is to receive, and does not ask for its bytes."""
    ranks = state["ranks"] if state else []
    return any(rank.get("phase") == "receiving" and not rank.get("waits", True) for rank in ranks)


def taken_over(state: Mapping[str, Any]) -> str:
    """The trainer that a server belongs to now, for messages."""
    return f"{state['trainer']} (epoch {state['epoch']})"


def is_away(error: BaseException) -> bool:
    """Whether a failure says that there is nobody, rather than what is wrong."""
    return isinstance(error, ServerSilent | Late)


class Watch:
    """Looks at all members while they are to do the same thing, and says whom not to wait for; in
    the log, whom all wait for.

    Used as a context; `lost` and `guilty` may be asked by any thread.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        version: int,
        patience: float,
        limit: float,
        as_others: float | None = None,
    ) -> None:
        """
        Args:
            members: by address.
            version: that they are sent.
            patience: seconds for which one of them may keep the others waiting.
            limit: that all of it may take from the first byte on.
            as_others: seconds that it took others, where these were late beside them: who takes
                longer by `patience` is late.
        """
        self._as_others = as_others
        self._members, self._version, self._patience, self._limit = (
            members,
            version,
            patience,
            limit,
        )
        self._laggards = Laggards(patience)
        self._clock = RunningClock()
        self._guilty: dict[str, str] = {}
        self._forming = ""
        self._sent_since: float | None = None
        self._said = 0.0
        self._behind = dict.fromkeys(members, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch over an update", daemon=True)
        self._heard = dict.fromkeys(members, self._clock.now())
        self._failure: BaseException | None = None

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def guilty(self) -> dict[str, str]:
        """Whom not to wait for, with the reason."""
        if self._failure is not None:
            raise self._failure
        return dict(self._guilty)

    @property
    def in_doubt(self) -> bool:
        """Whether several are named of whom nothing is known but that they are behind: one may be
        waiting for the other.
        """
        return len(self._guilty) > 1 and self._laggards.merely_behind

    def lost(self) -> str:
        """As `guilty`, in one sentence; empty while all may still come."""
        return "; ".join(f"{url} {reason}" for url, reason in self.guilty.items())

    def forming(self, key: str) -> None:
        """The members are to meet under this key; an empty one: they have, and are sent to."""
        self._forming, self._sent_since = key, None if key else self._clock.now()

    def sent(self) -> None:
        """Everything has been sent: nobody waits for bytes any more."""
        self._sent_since = None

    def _run(self) -> None:
        pause = _FIRST_LOOK_SECONDS
        while not self._ended.wait(pause):
            pause = _NEXT_LOOK_SECONDS
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - raised where the watch is asked
                self._failure = error
                return

    def _look(self) -> None:
        calls = {url: member.state for url, member in self._members.items()}
        states = at_once(calls, LOOK_SECONDS + 1.0, clock=self._clock).ok
        now, forming = self._clock.now(), self._forming
        progress = {}
        for url, member in self._members.items():
            state = states.get(url)
            if state is not None:
                self._heard[url] = now
            silent = (
                now - self._heard[url] if state is None else float(state.get("silent_seconds", 0.0))
            )
            ranks = state.get("ranks", []) if state else []
            trouble = member.broken(state)
            if forming and not trouble:
                trouble = next((str(rank["error"]) for rank in ranks if rank.get("error")), "")
            progress[url] = Progress(
                self._amount(ranks, forming), trouble, silent, not forming and holds_up(state)
            )
        if not self._ended.is_set():
            self._guilty = (
                self._guilty or self._laggards.named(progress, now) or self._later_than_others(now)
            )
            if not self._guilty:
                self._say_slowest({url: one.amount for url, one in progress.items()}, now)

    def _later_than_others(self, now: float) -> dict[str, str]:
        since, before = self._sent_since, self._as_others
        if since is None or before is None or now - since < before + self._patience:
            return {}
        return {url: f"is {now - since - before:.0f} s behind the others" for url in self._members}

    def _say_slowest(self, amounts: Mapping[str, int], now: float) -> None:
        """Whom all wait for who are sent to. Who is slow, and not late, is waited for to the end.

        Nobody is ever ahead by more than the sender's two buckets, so it is added up who was behind
        at each look.
        """
        most = max(amounts.values())
        for url, amount in amounts.items():
            self._behind[url] += most - amount
        since = self._sent_since
        if since is None or now - since < self._patience or now < self._said:
            return
        self._said = now + _SAY_EVERY_SECONDS
        worst = max(self._behind.values())
        slowest = ", ".join(
            f"{url} (has {_megabytes(amounts[url])})"
            for url in amounts
            if self._behind[url] == worst
        )
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + since + self._limit - now))
        logger.warning(
            "[Fleet] version %d is on its way for %.0f s, waiting for %s; the fastest of %d servers has %s; until %s",
            self._version, now - since, slowest, len(amounts), _megabytes(most), until,
        )  # fmt: skip

    def _amount(self, ranks: list[dict[str, Any]], forming: str) -> int:
        if forming:
            return 0  # who has not come is known at the meeting itself
        return min((int(rank.get("received_bytes") or 0) for rank in ranks), default=0)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
