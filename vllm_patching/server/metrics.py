"""The weight bridge's figures on vLLM's own GET /metrics.

They are ordinary gauges and counters of prometheus_client's default registry. They are brought up
to date on each GET /metrics and whenever a step of an update has been taken. A collector that
computes them on demand would be simpler. But it would be missing when PROMETHEUS_MULTIPROC_DIR is
set. Then vLLM answers from the files which gauges and counters write there, and from nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

State = Mapping[str, Any]
"""The result of BridgeState.to_json; of a server that shares no weights, only weight_version and
weight_epoch. Missing keys are left out."""


class BridgeMetrics:
    """The gauges and counters, and how they follow the state."""

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            registry: where they are registered; once in a process.
            clock: Unix time in seconds.
        """

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(
                f"lockstep_{name}", text, labels, registry=registry, multiprocess_mode="mostrecent"
            )

        self._clock = clock
        self._version = gauge("weight_version", "Weight version that the server serves")
        self._weight_epoch = gauge(
            "weight_epoch",
            "Unix milliseconds of the start of the trainer that made the weights served; 0: the checkpoint's",
        )
        self._epoch = gauge("bridge_epoch", "Trainers that have joined since the server started")
        self._healthy = gauge(
            "bridge_healthy",
            "1: the weights are whole; 0: nothing is generated until a full update",
        )
        self._updating = gauge("bridge_updating", "1 while an update is under way")
        self._seconds = gauge(
            "weight_update_seconds", "Seconds of a phase of the last update", ("phase",)
        )
        self._bytes = gauge("weight_update_bytes", "Bytes of weights that the last update moved")
        self._at = gauge(
            "weight_update_timestamp_seconds",
            "Unix time of the last update that was served; 0: none",
        )
        self._age = gauge(
            "weight_update_age_seconds",
            "Seconds since the last update that was served, or since the start",
        )
        self._updates = Counter(
            "lockstep_weight_updates", "Updates that were served", registry=registry
        )
        self._failures = Counter(
            "lockstep_weight_update_failures", "Updates that failed", registry=registry
        )
        self._counted = {"updates": 0, "failures": 0}
        self._phases: set[str] = set()
        self._last = clock()
        self._at.set(0)

    def refresh(self, state: State) -> None:
        """Follow the state."""
        self._version.set(state.get("weight_version", 0))
        self._weight_epoch.set(state.get("weight_epoch", 0))
        self._epoch.set(state.get("epoch", 0))
        self._healthy.set(float(bool(state.get("healthy", True))))
        self._updating.set(float(state.get("target_version") is not None))
        if self._count("updates", self._updates, state):
            self._last = self._clock()
            self._at.set(self._last)
        self._count("failures", self._failures, state)
        phases = {
            key.removeprefix("to_"): value for key, value in state.get("last_update", {}).items()
        }
        for gone in self._phases - phases.keys():
            self._seconds.labels(gone).set(
                float("nan")
            )  # the figure of an older update would be taken for the last one's
        for phase, value in phases.items():
            self._seconds.labels(phase).set(value)
        self._phases |= phases.keys()
        self._bytes.set(state.get("last_bytes", 0))
        self._age.set(self._clock() - self._last)

    def _count(self, key: str, counter: Counter, state: State) -> bool:
        new = int(state.get(key, self._counted[key])) - self._counted[key]
        if new > 0:
            counter.inc(new)
            self._counted[key] += new
        return new > 0


class FollowBridge:
    """ASGI middleware: refreshes the metrics before /metrics is answered, and after each step of an
    update.
    """

    def __init__(self, app: Any, metrics: BridgeMetrics, state: Callable[[], State]) -> None:
        self._app, self._metrics, self._state = app, metrics, state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "") if scope["type"] == "http" else ""
        if path.rstrip("/") == "/metrics":
            self._metrics.refresh(self._state())
        await self._app(scope, receive, send)
        if path.startswith("/bridge/"):
            self._metrics.refresh(self._state())


def attach_metrics(app: Any, state: Callable[[], State]) -> None:
    """Put the bridge's figures on the app's /metrics.

    Args:
        app: vLLM's app, its routes complete.
        state: the bridge's state as JSON, asked at each refresh.
    """
    app.middleware_stack = FollowBridge(
        app.middleware_stack or app.build_middleware_stack(), BridgeMetrics(), state
    )
