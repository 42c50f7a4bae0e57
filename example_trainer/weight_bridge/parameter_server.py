"""A trainer's way to parameter servers: a broadcast every so many steps, beside what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from example_trainer.errors import ConfigError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.base import SyncReport, Weights
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import ParameterServer


class ParameterServerBridge(BroadcastBridge):
    """Pushes to all parameter servers at once.

    Which vLLM servers get the weights from them, and when, is their affair.
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
        ConfigError: says what to change.
    """
    behind = -(-pull_every // push_every) * push_every - 1
    if max_staleness is not None and max_staleness < behind:
        raise ConfigError(
            f"{url} was started with --pull-every {pull_every}: with --push-every {push_every} vLLM servers are up to {behind} "
            f"versions behind, and --max-staleness {max_staleness} would wait for newer rollouts for ever; give at least "
            f"{behind}, or lower the others"
        )
