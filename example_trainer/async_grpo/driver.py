"""Starts the roles in order, watches them, starts again what fails, and stops everything at the
end, however it comes.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from example_trainer.async_grpo.actor import (
    Address,
    Look,
    NodeNeeds,
    NodeProblem,
    NodeReport,
    problem,
)
from example_trainer.async_grpo.cluster import Cluster, SeatLost, SeatSilent, demands_at_home
from example_trainer.async_grpo.restarts import Ended, Keeper, Policy, State
from example_trainer.async_grpo.roles import (
    STOP_ORDER,
    Commands,
    Role,
    amounts,
    demands_of,
    hardest_first,
    refusal,
    roles_of,
)
from example_trainer.async_grpo.service import Fleet, Silences
from example_trainer.async_grpo.settings import Settings
from example_trainer.child_processes.files import write_whole
from example_trainer.child_processes.processes import file_size
from example_trainer.errors import TrainerError
from example_trainer.observe.metrics import read_step_line

# Show the trainer's steps on the driver's terminal, read from the trainer's log as it grows.

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
"""Read at a time; the rest follows at the next look."""
LONGEST_LINE = 1 << 16
"""Bytes. A longer line is not the line of a step, and only its end is kept."""


class StepFollower:
    """Logs a short line for each step that the trainer logs.

    Args:
        log: the trainer's log. It need not exist yet. Lines of an earlier run in it are skipped.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = file_size(log)
        self._rest = b""
        self._last: int | None = None
        self._failed = False

    def report(self) -> None:
        """Log the steps that are new. An unreadable log costs one warning and no run."""
        try:
            text = self._read()
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "[Async] steps are not shown here: %s cannot be read: %s",
                    self._log,
                    error.strerror or error,
                )
            self._failed = True
            return
        self._failed = False
        *lines, rest = (self._rest + text).split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        for line in lines:
            figures = read_step_line(line.decode(errors="replace"))
            if figures is not None and figures.step != self._last:  # every rank may log a step
                self._last = figures.step
                logger.info("[Async] %s", figures)

    def _read(self) -> bytes:
        try:
            size = self._log.stat().st_size
        except FileNotFoundError:
            return b""
        if size < self._offset:  # the file was replaced
            self._offset, self._rest = 0, b""
        if size == self._offset:
            return b""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read(MOST_BYTES)
        self._offset += len(text)
        return text


TICK_SECONDS = 0.5
WAITING_SECONDS = 30.0
"""Between two lines about a role that cannot be placed, or does not answer."""
STOP_MARGIN_SECONDS = 30.0
SILENT_SECONDS = 30.0
"""Silence after which an actor counts as lost, although Ray does not report it as lost."""
LOOK_SECONDS = 60.0
"""Limit for an actor's report on its process, which the actor asks for ten seconds at most."""


class RunFailed(TrainerError):
    """The run cannot go on. A single line; everything that was started is stopped."""


class Driver:
    """One run.

    Args:
        settings: of it.
        cluster: where.
        keys: variable → key of the servers.
        fleet: gets the vLLM servers, and new addresses.
        silences: notices roles that run and do nothing.
        check: raises if the run shall stop; called at each look.
        commands: what starts each role, if not the project's own.
        clock, sleep: the time to go by.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        keys: Mapping[str, str],
        fleet: Fleet,
        silences: Silences,
        check: Callable[[], None] = lambda: None,
        commands: Commands | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._cluster, self._fleet, self._check = settings, cluster, fleet, check
        self._silences, self._clock, self._sleep = silences, clock, sleep
        orchestration = settings.orchestration
        policy = Policy(
            orchestration.proven_seconds,
            orchestration.restarts,
            orchestration.restart_delay,
            orchestration.steady_seconds,
        )
        self.keepers = {role.name: Keeper(role, policy) for role in roles_of(settings)}
        self._commands = commands or Commands(settings, keys)
        self._steps = StepFollower(settings.folder / "logs" / "trainer.log")
        self._marker = secrets.token_hex(8)
        self._ticked = clock()

    def run(self) -> None:
        """Everything, from the first look at the cluster to the end of training.

        Raises:
            RunFailed: it cannot go on.
        """
        demands = demands_at_home(
            demands_of([keeper.role for keeper in self.keepers.values()]), self._cluster.home()
        )
        nodes = self._cluster.nodes()
        if why := refusal(demands, nodes):
            raise RunFailed(why)
        for node in nodes:
            logger.info("[Async] %s has %s", node.name, amounts(node.free))
        try:
            (self._settings.folder / "logs").mkdir(parents=True, exist_ok=True)
            write_whole(self._settings.folder / ".run", self._marker.encode())
        except OSError as error:
            raise RunFailed(
                f"the driver: {problem(f'{self._settings.folder} cannot be written', error)}"
            ) from error
        try:
            for demand in hardest_first(demands):
                self._cluster.reserve(demand)
            while not self.trainer_is_done():
                self._check()
                self.tick()
                self._sleep(TICK_SECONDS)
            logger.info("[Async] training is complete; all roles are stopped")
        finally:
            self.stop()

    def trainer_is_done(self) -> bool:
        """Return whether training has come to its end."""
        return self.keepers["trainer"].state is State.DONE

    def tick(self) -> None:
        """Look at every role once and do what is due."""
        now = self._clock()
        if (
            now - self._ticked > SILENT_SECONDS
        ):  # this process stood still; answers that came are not read yet
            for keeper in self.keepers.values():
                keeper.asked = now
            self._silences.forget()
        self._ticked = now
        for keeper in self.keepers.values():
            try:
                self._advance(keeper)
            except SeatSilent as silent:
                self._silent(keeper, str(silent))
            except SeatLost as lost:
                self._lost(keeper, str(lost))
            except NodeProblem as found:
                raise RunFailed(
                    f"node {self._host(keeper)} cannot run {keeper.role.name}: {found}"
                ) from found
        self._tell_fleet()
        self._silences.watch(self.keepers.values())
        self._steps.report()

    def _tell_fleet(self) -> None:
        service = self.keepers["service"]
        if service.state is State.UP and service.place is not None:
            places = [
                keeper.place for keeper in self.keepers.values() if keeper.role.kind == "generator"
            ]
            urls = [place.url for place in places if place is not None]
            self._fleet.tell(service.place, urls if len(urls) == len(places) else None)

    # ---- one role
    # ----------------------------------------------------------------------------------------------------

    def _advance(self, keeper: Keeper) -> None:
        now = self._clock()
        if keeper.state is State.DONE:
            return
        if keeper.state is State.WAITING:
            if now >= keeper.due and self._may_start(keeper):
                self._sit_down(keeper, now)
            return
        if keeper.state is State.ENDING:
            self._end(keeper, now)
            return
        if keeper.pending is None or not keeper.pending.done():
            if keeper.state in (State.STARTING, State.UP) and now - keeper.asked > LOOK_SECONDS:
                raise SeatLost(
                    "is out of reach: its actor, which looks after it, has not answered for "
                    f"{now - keeper.asked:.0f} s"
                )
            self._wait(keeper, now)
            return
        answer, keeper.pending = keeper.pending.get(), None
        keeper.silent_since = None
        if keeper.state is State.PLACING:
            self._placed(keeper, answer, now)
        elif keeper.state is State.LAUNCHING:
            keeper.enter(State.STARTING, now)
            self._look(keeper)
        else:
            self._looked(keeper, answer, now)

    def _may_start(self, keeper: Keeper) -> bool:
        role = keeper.role
        needed = role.needs
        if not keeper.lives:
            needed += role.wants
        has_addresses = all(self.keepers[name].place is not None for name in role.knows)
        return has_addresses and all(self.keepers[name].state is State.UP for name in needed)

    def _sit_down(self, keeper: Keeper, now: float) -> None:
        role = keeper.role
        keeper.lives += 1
        keeper.seat = self._cluster.seat(role, str(self._settings.folder), keeper.lives)
        settings = self._settings
        needs = NodeNeeds(
            folder=str(settings.folder),
            marker=self._marker,
            model=settings.model if role.kind in ("generator", "trainer", "reference") else "",
            environment=settings.inference.environment if role.kind == "environment" else "",
            ray=self._cluster.version,
            ports=role.ports,
            wanted=keeper.place.ports if keeper.place else (),
        )
        keeper.needs, keeper.blocked_since = needs, None
        keeper.pending = keeper.seat.ask("check", needs)
        keeper.enter(State.PLACING, now)

    def _placed(self, keeper: Keeper, report: NodeReport, now: float) -> None:
        assert keeper.seat is not None
        role, before, node = keeper.role, keeper.place, keeper.seat.node()
        host = self._cluster.host(node)
        if report.problems:
            raise RunFailed(
                f"node {host} ({report.hostname}) cannot run {role.name}: {report.problems[0]}"
            )
        if report.earlier:
            self._wait_for_the_end(keeper, host, report.earlier, now)
            return
        keeps = role.kind in ("service", "trainer")  # what these have on their disk is the run
        if (
            before is not None
            and keeps
            and node != keeper.node
            and not (keeper.common and report.common)
        ):
            raise RunFailed(
                f"the node of the {role.name} is lost, and {self._settings.folder} with what it "
                "needs is not common to all nodes. Put logging.folder on a disk that all nodes "
                "have, or start the run again where that folder is"
            )
        keeper.node, keeper.common = node, report.common
        keeper.place = Address(host, report.ports, report.gpus)
        if role.kind == "generator" and before is not None and before.server != keeper.place.server:
            self._fleet.moved(before, keeper.place)
        places = {
            name: other.place for name, other in self.keepers.items() if other.place is not None
        }
        launch = self._commands.launch(role, places, first=keeper.lives == 1)
        keeper.bound = self._bound(role)
        keeper.missing = ""
        where = " port ".join([host, *map(str, report.ports[:1])])
        logger.info("[Async] %s on %s", role.name, where)
        keeper.pending = keeper.seat.ask("start", launch, role.grace, role.may_finish)
        keeper.enter(State.LAUNCHING, now)

    def _wait_for_the_end(
        self, keeper: Keeper, host: str, earlier: tuple[int, ...], now: float
    ) -> None:
        """Ask again until the leftovers of an earlier run on the node have ended. Its trainer may
        be at its last checkpoint, and its model on the GPU. If an orphan's guard was killed, no
        other process ends the orphan, so it is killed when its time is over.
        """
        role = keeper.role
        if keeper.blocked_since is None:
            keeper.blocked_since, keeper.blocked_told = now, -math.inf
        waited, limit = now - keeper.blocked_since, role.grace + STOP_MARGIN_SECONDS
        who = (
            f"process{'es' * (len(earlier) > 1)} {', '.join(map(str, earlier))} of an earlier life"
        )
        if waited > limit + STOP_MARGIN_SECONDS:
            raise RunFailed(
                f"{role.name} cannot be started on {host}: {who} did not end in {waited:.0f} s, "
                "by SIGKILL neither. See there what holds it (`ps -o pid,stat,wchan,cmd -p "
                f"{','.join(map(str, earlier))}`), or start that machine again"
            )
        assert keeper.seat is not None
        assert keeper.needs is not None
        late = waited > limit
        if late and not keeper.needs.end_earlier:
            logger.warning(
                "[Async] %s on %s: %s did not end in %.0f s and is killed",
                role.name,
                host,
                who,
                waited,
            )
        elif now - keeper.blocked_told > WAITING_SECONDS:
            keeper.blocked_told = now
            logger.info(
                "[Async] %s on %s waits for the end of %s, for %.0f s so far",
                role.name,
                host,
                who,
                waited,
            )
        keeper.needs = replace(keeper.needs, end_earlier=late)
        keeper.pending = keeper.seat.ask("check", keeper.needs)
        keeper.enter(State.PLACING, now)

    def _bound(self, role: Role) -> tuple[Address | None, ...]:
        return tuple(self.keepers[name].place for name in role.bound)

    def _look(self, keeper: Keeper) -> None:
        role = keeper.role
        path, url = role.ready[min(keeper.lives, 2) - 1], ""
        if path and keeper.place:
            url = keeper.place.url + path
        assert keeper.seat is not None
        keeper.pending, keeper.asked = (
            keeper.seat.ask("look", url, keeper.log_offset),
            self._clock(),
        )

    def _looked(self, keeper: Keeper, look: Look, now: float) -> None:
        role = keeper.role
        if look.log:
            try:
                with open(self._log(keeper), "ab") as file:
                    file.write(look.log)
            except OSError as error:
                raise RunFailed(
                    f"the driver: {problem(f'{self._log(keeper)} cannot be written', error)}"
                ) from error
            keeper.log_offset += len(look.log)
        if look.code is not None:
            self._ended(keeper, look, now)
            return
        keeper.missing = look.missing
        if look.ready and keeper.state is State.STARTING:
            keeper.enter(State.UP, now)
            self._silences.forget(role.name)
            again = ""
            if keeper.lives > 1:
                again = f" again, life {keeper.lives}"
            logger.info("[Async] %s runs%s after %.0f s", role.name, again, look.lived)
        # A process that listens nowhere has shown that it works when it has lived for a while.
        policy = keeper.row.policy
        keeper.was_up = keeper.was_up or (
            look.ready and (bool(role.ready[0]) or look.lived >= policy.proven)
        )
        if keeper.bound != self._bound(role):
            moved = [
                name
                for name, place in zip(role.bound, keeper.bound, strict=True)
                if self.keepers[name].place != place
            ]
            logger.info(
                "[Async] %s is restarted: %s has another address", role.name, " and ".join(moved)
            )
            assert keeper.seat is not None
            keeper.pending = keeper.seat.ask("stop")
            keeper.enter(State.ENDING, now)
            return
        if self._is_hung(keeper, now):
            return
        self._wait(keeper, now)
        self._look(keeper)

    def _is_hung(self, keeper: Keeper, now: float) -> bool:
        """End a role that runs and is silent for too long, to be started again.

        Return whether it is being ended.
        """
        limit = self._settings.orchestration.silent_seconds
        if not (why := self._silences.why_to_end(keeper, limit, self._log(keeper), now)):
            return False
        if keeper.row.after(Ended(None, now - keeper.since, keeper.was_up)) is None:
            raise RunFailed(f"{why}; it failed {keeper.row.count} times in a row")
        logger.warning("[Async] %s; it is ended and started again", why)
        assert keeper.seat is not None
        keeper.pending = keeper.seat.ask("stop")
        keeper.enter(State.ENDING, now)
        return True

    def _wait(self, keeper: Keeper, now: float) -> None:
        """Log what a role waits for. End the run if it has waited too long."""
        if keeper.state is State.UP:
            return
        limit = self._settings.orchestration.start_seconds
        placing = keeper.state is State.PLACING
        why = keeper.missing or "no answer yet"
        if placing:
            why = f"asks {amounts(keeper.role.resources)}"
        if now - keeper.since > limit:
            there = f"; log: {self._log(keeper)}"
            if placing:
                nodes = self._cluster.nodes()
                free = "; ".join(f"{node.name} has {amounts(node.free)} free" for node in nodes)
                there = f"; the cluster: {free}"
            raise RunFailed(
                f"{keeper.role.name} {keeper.state.value} for more than {limit:.0f} s: {why}{there}"
            )
        if now - keeper.told > WAITING_SECONDS:
            keeper.told = now
            waited, who = now - keeper.since, f"{keeper.role.name} {keeper.state.value}"
            logger.info(
                "[Async] %s: %s; for %.0f s so far, %.0f s at most", who, why, waited, limit
            )

    def _host(self, keeper: Keeper) -> str:
        node = keeper.node
        if not node and keeper.seat is not None:
            node = keeper.seat.node()
        return self._cluster.host(node)

    def _log(self, keeper: Keeper) -> str:
        return str(self._settings.folder / "logs" / f"{keeper.role.name}.log")

    # ---- the end of one
    # ----------------------------------------------------------------------------------------------

    def _ended(self, keeper: Keeper, look: Look, now: float) -> None:
        role = keeper.role
        if look.code == 0 and role.may_finish:
            logger.info("[Async] %s is done", role.name)
            keeper.enter(State.DONE, now)
            self._release(keeper)
            return
        self._again(
            keeper,
            Ended(look.code, look.lived, keeper.was_up),
            f"{look.said}; log: {self._log(keeper)}",
            now,
        )

    def _silent(self, keeper: Keeper, why: str) -> None:
        now = self._clock()
        if keeper.silent_since is None:
            keeper.silent_since = now
        if keeper.state is State.UP and now - keeper.silent_since < SILENT_SECONDS:
            self._look(keeper)
        else:
            self._lost(keeper, why)

    def _lost(self, keeper: Keeper, why: str) -> None:
        now = self._clock()
        lived = 0.0
        if keeper.state is State.UP:
            lived = now - keeper.since
        if keeper.node and not self._cluster.lives(keeper.node):
            why = f"its node is lost: {why}"
        self._again(keeper, Ended(None, lived, keeper.was_up), why, now)

    def _again(self, keeper: Keeper, ended: Ended, why: str, now: float) -> None:
        delay = keeper.row.after(ended)
        name = keeper.role.name
        if delay is None:
            how = f"failed {keeper.row.count} times in a row"
            if keeper.row.count == 0:
                how = "would do so again"
            raise RunFailed(f"{name} {why}; it {how}")
        logger.warning("[Async] %s %s; it is started again in %.0f s", name, why, delay)
        self._give_up(keeper, now, delay)

    def _end(self, keeper: Keeper, now: float) -> None:
        """Wait until a process that was signalled has ended, the trainer with its checkpoint
        written.
        """
        if keeper.pending is not None and not keeper.pending.done():
            waited = now - keeper.since
            if waited < keeper.role.grace + STOP_MARGIN_SECONDS:
                return
            logger.warning(
                "[Async] %s did not stop in %.0f s and is killed", keeper.role.name, waited
            )
        self._give_up(
            keeper, now, 0.0
        )  # what an actor that is gone may have left is waited for on the node

    def _give_up(self, keeper: Keeper, now: float, delay: float) -> None:
        self._release(keeper)
        keeper.enter(State.WAITING, now)
        keeper.due = now + delay

    def _release(self, keeper: Keeper) -> None:
        if keeper.seat is not None:
            keeper.seat.kill()
        keeper.seat, keeper.pending = None, None
        if not keeper.common:
            keeper.log_offset = 0  # the next node has a log of its own

    # ---- the end of all
    # ----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop every process, in STOP_ORDER; never raises for one that is gone."""
        for kind in STOP_ORDER:
            keepers = [
                keeper
                for keeper in self.keepers.values()
                if keeper.role.kind == kind and keeper.seat is not None
            ]
            pending = []
            for keeper in keepers:
                assert keeper.seat is not None
                if keeper.state not in (State.PLACING, State.WAITING):
                    pending.append((keeper, keeper.seat.ask("stop")))
            limit = (
                self._clock()
                + max([keeper.role.grace for keeper, _ in pending], default=0.0)
                + STOP_MARGIN_SECONDS
            )
            for keeper, answer in pending:
                while not answer.done() and self._clock() < limit:
                    self._sleep(0.1)
                if not answer.done():
                    logger.warning(
                        "[Async] %s did not stop in time and is killed", keeper.role.name
                    )
            for keeper in keepers:
                self._release(keeper)
                if keeper.state is not State.DONE:
                    keeper.enter(State.WAITING, self._clock())
        self._cluster.close()
