"""One gate per inference server: requests that find it down wait here together, with one line in the log for all of them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from atroposlib.envs.errors import InferenceUnavailable
from atroposlib.envs.waiting import Patience

logger = logging.getLogger(__name__)

DEFAULT_OUTAGE_TIMEOUT = 1800.0


class HealthGate:
    """Opens while the server is well.

    Args:
        url: the server's address, for messages.
        probe: returns None when the server is well, else what is wrong with it.
        role: what it is, for messages.
        address_flag: how its address is passed.
    """

    def __init__(
        self,
        url: str,
        probe: Callable[[], Awaitable[str | None]],
        role: str = "inference server",
        address_flag: str = "--openai.base_url",
    ):
        self.url = url
        self.probe = probe
        self.role, self.address_flag = role, address_flag
        self.outage_timeout = DEFAULT_OUTAGE_TIMEOUT
        self.failure: InferenceUnavailable | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._away_before = 0.0
        self._away_since: float | None = None

    @property
    def seconds_away(self) -> float:
        """For how long the server has been away since the start, all its outages together."""
        return self._away_before + (0.0 if self._away_since is None else time.monotonic() - self._away_since)

    @property
    def open(self) -> bool:
        return self._recovery is None and self.failure is None

    async def wait_until_well(self, why: str) -> None:
        """Return once the server answers its probe.

        Raises:
            InferenceUnavailable: it did not within `outage_timeout` seconds; also for every later caller.
        """
        if self.failure is not None:
            raise self.failure
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(why))
        # A caller that is cancelled must not cancel the recovery that others wait for.
        await asyncio.shield(self._recovery)

    async def _recover(self, why: str) -> None:
        patience = Patience(
            f"{self.role} at {self.url}",
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
