"""Which of several inference servers a request goes to. Pure: no I/O and no clock; `now` is in
seconds and never goes back.

What is known of a server comes from two sources. A *look* asks it: is it serving, which weights has
it, how many requests are in flight there. A *request* experiences it: answered, refused because the
server is away, failed although it is there. A look may say that all is well where every request
fails, so neither replaces the other:

* a server that is away, by either source, gets nothing until a later look finds it well;
* one that fails gets nothing for a pause that doubles with every failure in a row, and then one
  request, as a trial;
* of the others, those with the freshest weights are asked, and among them the one with the least to
  do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from atroposlib.inference.generation import Weights

SETTLING_SECONDS = 2.0
"""Servers take over new weights at nearly the same time, and are looked at a little later one than
the other: only who is still behind after so long counts as behind. Otherwise the first one to be
seen with new weights would be sent everything."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds for which a server gets nothing after its first failure, and at most."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Look:
    """A server's answer to a health probe."""

    wrong: str = ""
    """Why it cannot be asked for anything; empty if it can."""
    weights: Weights | None = None
    """Weights that it serves; None if it does not report them."""
    in_flight: int | None = None
    """Requests that it works on, whoever sent them; None if it does not say."""


@dataclass(frozen=True, slots=True)
class Load:
    """This process's requests at one server."""

    ours: int
    """Requests."""
    most: int
    """As many may be at once."""


@dataclass(slots=True)
class Standing:
    """State of one server."""

    away: str = ""
    """Why it cannot be asked; empty if it can."""
    away_since: float = 0.0
    """When it began to be away, without having been well in between."""
    refused_at: float = 0.0
    """When a request was refused last: only a look that began later knows more."""
    weights: Weights | None = None
    in_flight: int | None = None
    ours_then: int = 0
    """This process's share of the requests in flight."""
    failures: int = 0
    """In a row. What fails at the same time counts once."""
    failed_at: float = 0.0
    avoid_until: float = 0.0

    def load(self, ours: int) -> int:
        """Requests in flight there now, as far as can be known."""
        return ours if self.in_flight is None else max(ours, self.in_flight + ours - self.ours_then)

    @property
    def pause(self) -> float:
        """Seconds for which it gets nothing after its last failure."""
        return (
            min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 16)) if self.failures else 0.0
        )


@dataclass
class Routing(Generic[Key]):
    """The servers' standings, and the choice among them."""

    standings: dict[Key, Standing] = field(default_factory=dict)
    _newest: deque[tuple[float, Weights]] = field(default_factory=deque)
    """The newest weights seen anywhere, each with when they were first seen."""

    def of(self, key: Key) -> Standing:
        """A server's standing; one that was not heard of is taken to be well."""
        known = self.standings.get(key)
        if known is None:
            known = self.standings[key] = Standing()
        return known

    def keep_only(self, keys: Collection[Key]) -> None:
        """Forget all other servers."""
        self.standings = {key: standing for key, standing in self.standings.items() if key in keys}

    # ---- what is seen ----

    def looked(self, key: Key, began: float, now: float, look: Look, ours: int = 0) -> None:
        """A look is over.

        Args:
            key: the server.
            began: when it was sent.
            now: when it was answered, or given up.
            look: what came of it.
            ours: requests that this process has there now.
        """
        known = self.of(key)
        if look.wrong:
            self._away(known, now, look.wrong)
            known.failures, known.avoid_until = (
                0,
                0.0,
            )  # it is known why; when it is back, it is asked at once
            return
        known.in_flight, known.ours_then = look.in_flight, ours
        if look.weights is not None:
            known.weights = look.weights
            if not self._newest or look.weights > self._newest[-1][1]:
                self._newest.append((now, look.weights))
        if began >= known.refused_at:
            known.away = ""

    def refused(self, key: Key, began: float, now: float, why: str) -> None:
        """A request, sent at `began`, found the server away."""
        known = self.of(key)
        known.refused_at = now
        self._away(known, now, why)
        self.failed(key, began, now)

    def failed(self, key: Key, began: float, now: float) -> None:
        """A request, sent at `began`, failed by the server's fault."""
        known = self.of(key)
        if began < known.failed_at:
            return  # it was under way already when another one failed: that is the same fault
        known.failures += 1
        known.failed_at, known.avoid_until = now, now + known.pause

    def answered(self, key: Key, began: float) -> None:
        """A request, sent at `began`, was answered."""
        known = self.of(key)
        if began >= known.failed_at:
            known.failures, known.avoid_until = 0, 0.0

    @staticmethod
    def _away(known: Standing, now: float, why: str) -> None:
        if not known.away:
            known.away_since = now
        known.away = why

    # ---- what follows ----

    def available(self, keys: Sequence[Key]) -> list[Key]:
        """Return the servers that accept requests."""
        return [key for key in keys if not self.of(key).away]

    def lost(self, keys: Sequence[Key], now: float, patience: float) -> list[Key]:
        """Those whose requests had better be asked elsewhere: away for `patience` seconds while
        others can be asked.
        """
        if not self.available(keys):
            return []
        return [
            key for key in keys if self.of(key).away and now - self.of(key).away_since >= patience
        ]

    def settled_weights(self, now: float) -> Weights | None:
        """The weights that every server should have by now; None if none says which it has."""
        while len(self._newest) > 1 and self._newest[1][0] <= now - SETTLING_SECONDS:
            self._newest.popleft()
        if not self._newest or self._newest[0][0] > now - SETTLING_SECONDS:
            return None
        return self._newest[0][1]

    def choose(
        self,
        loads: Sequence[tuple[Key, Load]],
        now: float,
        preferred: Key | None = None,
        tried: Collection[Key] = (),
    ) -> Key | None:
        """The server that the next request goes to; None if all are away.

        Args:
            loads: the servers that may be asked, each with what is under way there. Among equals
                the first one is taken.
            now: the time.
            preferred: taken whatever its load, if no other is better in any other way: it may still
                have what a conversation said before.
            tried: servers at which this request has failed already: asked again only if there is no
                other.
        """
        settled = self.settled_weights(now)

        def merit(key: Key) -> tuple[bool, bool, float, tuple[int, int]]:
            known = self.of(key)
            avoided = now < known.avoid_until
            behind = (0, 0)
            if settled is not None and known.weights is not None and known.weights < settled:
                # The freshest of those that are behind; any of them is behind those that are not.
                behind = (
                    1 + settled.epoch - known.weights.epoch,
                    settled.version - known.weights.version,
                )
            return key in tried, avoided, known.avoid_until if avoided else 0.0, behind

        def burden(key: Key, load: Load) -> tuple[bool, int]:
            return load.ours >= load.most, self.of(key).load(load.ours)

        candidates = [(merit(key), key, load) for key, load in loads if not self.of(key).away]
        if not candidates:
            return None
        best = min(rank for rank, _, _ in candidates)
        good = [(key, load) for rank, key, load in candidates if rank == best]
        if preferred is not None and any(key == preferred for key, _ in good):
            return preferred
        return min(good, key=lambda entry: burden(*entry))[0]

    def sent(self, key: Key, now: float) -> None:
        """A request goes there.

        After failures it is the trial: what follows waits for what comes of it.
        """
        known = self.of(key)
        if known.failures:
            known.avoid_until = now + known.pause
