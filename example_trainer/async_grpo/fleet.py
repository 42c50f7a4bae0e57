"""Tells the trainer, by way of the rollout service, that a vLLM server has moved. Its keeper does the rest."""

from __future__ import annotations

import logging
from typing import Protocol

from example_trainer.async_grpo.launch import Address
from example_trainer.child_processes.readiness import post_json

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """Who is told."""

    def moved(self, service: Address | None, before: Address, now: Address) -> None:
        """A server that was at one address is at another."""


class ServiceFleet:
    """POST /fleet/join and /fleet/leave at the rollout service.

    Args:
        key: of the rollout service.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def moved(self, service: Address | None, before: Address, now: Address) -> None:
        """See Fleet. A service that does not answer is no error: a trainer that starts again is told the addresses anyway."""
        for path, server in (("join", now), ("leave", before)):
            if service is None:
                return
            try:
                post_json(f"{service.url}/fleet/{path}", {"url": server.url}, key=self._key)
                logger.info("[Async] the trainer is told that %s shall %s", server.url, path)
            except OSError as error:
                logger.warning("[Async] POST %s/fleet/%s: %s", service.url, path, error)
