"""Forgets environments that have been silent for long, so that registrations stay bounded. Pure: no I/O, no clock of its own.

It happens when another environment registers. An environment is kept while anything of it waits or is handed out. One that is
forgotten gets 404 at its next call, as after `/reset_data`, and registers again; its number is not given to another one.
"""

from __future__ import annotations

from atroposlib.service.queue_state import QueueState
from atroposlib.service.records import NOBODY, QueueError

MOST_ENVIRONMENTS = 1024
"""Registered environments, those that have left included."""
FORGET_SECONDS = 86_400.0
"""Silence after which an environment is forgotten. If MOST_ENVIRONMENTS are registered, `silent_after` is enough."""
MOST_STREAMS = 1024
"""Streams of items of one run. Each must be remembered, since a stream that is forgotten would begin again."""


class RegistryFullError(QueueError):
    """As many environments are registered, or streams are open, as may be."""


class Forgetting(QueueState):
    """Forgets silent environments."""

    def make_space_for_environment(self, now: float, stream: str | None) -> None:
        """Forget environments that have been silent for long; and more of them if one more could not be registered.

        Raises:
            RegistryFullError: as many as may be are in use.
        """
        idle = self._idle_environments()
        silence = {env_id: now - self.registry.last_seen[env_id] for env_id in idle}
        self._forget_environments([env_id for env_id in idle if silence[env_id] > FORGET_SECONDS])
        excess = len(self.registry.last_seen) + 1 - MOST_ENVIRONMENTS
        if excess > 0:
            silent = self.limits.silent_after
            gone = [
                one
                for one in idle
                if one in self.registry.by_id and (silence[one] > silent or not self.registry.by_id[one].connected)
            ]
            if len(gone) < excess:
                raise RegistryFullError(
                    f"{MOST_ENVIRONMENTS} environments are registered, as many as may be, and only {len(gone)} of them are "
                    "silent with nothing waiting: stop some of them, and try again"
                )
            gone.sort(key=lambda one: -silence[one])
            self._forget_environments(gone[:excess])
        if stream is not None and stream not in self.streams.by_name and len(self.streams.by_name) >= MOST_STREAMS:
            raise RegistryFullError(
                f"{MOST_STREAMS} streams of items are open, as many as may be: end this run (GET /reset_data) to begin others"
            )

    def _idle_environments(self) -> list[int]:
        """Environments of which nothing waits or is handed out, those that registered first in front."""
        busy = {line for line, groups in self.lines.by_line.items() if groups}
        busy |= {line for line, buffer in self.buffers.items() if buffer}
        busy |= {group.line for group in self.reference.waiting.values()}
        busy |= {group.line for lease in self.leases.values() for group in lease.groups}
        busy |= {group.line for group in self.failures.groups()}
        return [env_id for env_id in self.registry.by_id if env_id not in busy and env_id != NOBODY]

    def _forget_environments(self, env_ids: list[int]) -> None:
        for env_id in env_ids:
            self.lines.close(env_id)
            self.buffers.pop(env_id, None)
            self.registry.forget(env_id)
        self._state_changed |= bool(env_ids)
