"""The gate before inference servers: requests that find all away wait here together, with one line
in the log for all.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from atroposlib.errors import InferenceUnavailable
from atroposlib.utils.waiting import Patience

logger = logging.getLogger(__name__)

DEFAULT_OUTAGE_TIMEOUT = 1800.0


class HealthGate:
    """Opens while a server is well.

    Args:
        what: says what is waited for.
        probe: returns None when a server is well, else what is wrong.
        address_flag: how its address is passed.
    """

    def __init__(
        self, what: Callable[[], str], probe: Callable[[], Awaitable[str | None]], address_flag: str
    ):
        self.what, self.probe, self.address_flag = what, probe, address_flag
        self.outage_timeout = DEFAULT_OUTAGE_TIMEOUT
        self.failure: InferenceUnavailable | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._away_before = 0.0
        self._away_since: float | None = None

    @property
    def seconds_away(self) -> float:
        """For how long nothing could be asked since the start, all outages together."""
        return self._away_before + (
            0.0 if self._away_since is None else time.monotonic() - self._away_since
        )

    @property
    def open(self) -> bool:
        return self._recovery is None and self.failure is None

    async def wait_until_well(self, why: str) -> None:
        """Return once a server is well.

        Raises:
            InferenceUnavailable: it did not within `outage_timeout` seconds; also for every later
                caller.
        """
        if self.failure is not None:
            raise self.failure
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(why))
        # A caller that is cancelled must not cancel the recovery that others wait for.
        await asyncio.shield(self._recovery)

    async def _recover(self, why: str) -> None:
        patience = Patience(
            self.what(),
            self.outage_timeout,
            InferenceUnavailable,
            logger,
            f"start it, or pass its address as {self.address_flag}",
        )
        self._away_since = time.monotonic()
        try:
            while True:
                await patience.wait(why)
                wrong = await self.probe()
                if wrong is None:
                    patience.done()
                    return
                why = wrong
        except InferenceUnavailable as failure:
            self.failure = failure
            raise
        finally:
            self._recovery, self._away_before, self._away_since = None, self.seconds_away, None
