"""The servers of a fleet as rank 0 of the trainer meets them: each has its own state, and all are
watched at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from example_trainer.errors import BridgeError, TrainerError
from example_trainer.vllm_client import ServerSilent
from example_trainer.weight_bridge.asking import Late, RunningClock, at_once
from example_trainer.weight_bridge.diagnosis import Evidence, Loss, Progress, Reason, diagnose
from example_trainer.weight_bridge.fleet import Sight
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

    def evidence(self, state: dict[str, Any] | None, version: int) -> Evidence:
        """Return what a state says of the update to `version`; None: the server did not answer."""
        if state is None:
            return Evidence(answers=False)
        gave_up = ""
        if state["target_version"] is None and state.get("gave_up_waiting") == version:
            gave_up = f"gave version {version} up: {state['last_error']}"
        ranks = state.get("ranks", [])
        errors = dict.fromkeys(str(rank["error"]) for rank in ranks if rank.get("error"))
        return Evidence(
            broken=self._broken(state),
            gave_up=gave_up,
            rank_errors="; ".join(errors),
            silent=float(state.get("silent_seconds", 0.0)),
            received=min((int(rank.get("received_bytes") or 0) for rank in ranks), default=0),
            idle=any(
                rank.get("phase") == "receiving" and not rank.get("waits", True) for rank in ranks
            ),
        )

    def _broken(self, state: dict[str, Any]) -> Reason | None:
        """Return why the server cannot finish its update; None while it may."""
        if state["instance"] != self.instance:
            return Reason("was restarted", Loss.RESTARTED)
        if state["epoch"] != self.epoch:
            return Reason(f"{taken_over(state)} has taken it over", Loss.TAKEN_OVER)
        if state["engine_dead"]:
            return Reason("vLLM's engine process has died")
        if state.get("engine_trouble"):
            return Reason(str(state["engine_trouble"]))
        return None


MemberCheck = Callable[[Member], None]


def taken_over(state: Mapping[str, Any]) -> str:
    """The trainer that a server belongs to now, for messages."""
    return f"{state['trainer']} (epoch {state['epoch']})"


def is_away(error: BaseException) -> bool:
    """Whether a failure says that there is nobody, rather than what is wrong."""
    return isinstance(error, ServerSilent | Late)


class Watch:
    """Looks at all members while they do the same step of an update. Names those not to wait for,
    and logs which one all wait for.

    Used as a context; any thread may read `lost` and `reasons`.
    """

    def __init__(
        self, members: Mapping[str, Member], version: int, patience: float, limit: float
    ) -> None:
        """
        Args:
            members: by address.
            version: that they are sent.
            patience: seconds for which one of them may delay the others.
            limit: seconds for all of it, from the first byte on.
        """
        self._members, self._version = members, version
        self._patience, self._limit = patience, limit
        self._progress = Progress()
        self._clock = RunningClock()
        self._reasons: dict[str, Reason] = {}
        self._forming = False
        self._sent_since: float | None = None
        self._next_line = 0.0
        self._behind = dict.fromkeys(members, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch over an update", daemon=True)
        self._answered = dict.fromkeys(members, self._clock.now())
        self._failure: BaseException | None = None

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def reasons(self) -> dict[str, Reason]:
        """The servers not to wait for."""
        if self._failure is not None:
            raise self._failure
        return dict(self._reasons)

    def texts(self) -> dict[str, str]:
        """Return `reasons` as sentences without the address."""
        return {url: reason.text for url, reason in self.reasons.items()}

    def lost(self) -> str:
        """Return `reasons` as one sentence; empty while all may still come."""
        return "; ".join(f"{url} {text}" for url, text in self.texts().items())

    def forming(self) -> None:
        """Begin to watch the members meet."""
        self._forming, self._sent_since = True, None

    def sending(self) -> None:
        """Begin to watch the members receive."""
        self._forming, self._sent_since = False, self._clock.now()

    def sent(self) -> None:
        """Stop to log which member all wait for: everything has been sent."""
        self._sent_since = None

    def _run(self) -> None:
        pause = _FIRST_LOOK_SECONDS
        while not self._ended.wait(pause):
            pause = _NEXT_LOOK_SECONDS
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - raised where the watch is read
                self._failure = error
                return

    def _look(self) -> None:
        calls = {url: member.state for url, member in self._members.items()}
        states = at_once(calls, LOOK_SECONDS + 1.0, clock=self._clock).ok
        now = self._clock.now()
        evidence = {
            url: self._evidence(url, member, states.get(url), now)
            for url, member in self._members.items()
        }
        if self._ended.is_set() or self._reasons:
            return
        self._reasons = diagnose(self._progress.timed(evidence, now), self._patience)
        if not self._reasons:
            self._log_slowest({url: one.received for url, one in evidence.items()}, now)

    def _evidence(
        self, url: str, member: Member, state: dict[str, Any] | None, now: float
    ) -> Evidence:
        evidence = member.evidence(state, self._version)
        if state is None:
            return replace(evidence, silent=now - self._answered[url])
        self._answered[url] = now
        # A server that gave the version up is joined again once its own step has failed.
        evidence = replace(evidence, gave_up="")
        if not self._forming:
            return evidence
        # The meeting itself shows which receivers did not come.
        evidence = replace(evidence, received=0, idle=False)
        if evidence.rank_errors:
            return replace(evidence, failure=Reason(evidence.rank_errors))
        return evidence

    def _log_slowest(self, received: Mapping[str, int], now: float) -> None:
        """Log which members all wait for. A slow member that is not late is waited for.

        No member is ever ahead by more than the sender's two buckets, so each look adds up how far
        behind a member is.
        """
        most = max(received.values())
        for url, amount in received.items():
            self._behind[url] += most - amount
        since = self._sent_since
        if since is None or now - since < self._patience or now < self._next_line:
            return
        self._next_line = now + _SAY_EVERY_SECONDS
        worst = max(self._behind.values())
        slowest = ", ".join(
            f"{url} (has {_megabytes(received[url])})"
            for url in received
            if self._behind[url] == worst
        )
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + since + self._limit - now))
        logger.warning(
            "[Fleet] version %d is on its way for %.0f s, waiting for %s; the fastest of %d servers has %s; until %s",
            self._version, now - since, slowest, len(received), _megabytes(most), until,
        )  # fmt: skip


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
