"""The stand-in for the rollout service in tests of an environment's own loop, which choose what its
trainer does. All other tests run the real service. It takes the place of the client.
"""

from __future__ import annotations

from typing import Any

STATUS = {"queue_size": 0, "env_weight": 1.0}
REGISTERED = {
    "status": "success",
    "env_id": 0,
    "wandb_name": "mine_0",
    "checkpoint_dir": "",
    "checkpoint_interval": 2,
    "num_steps": 9,
}


class RolloutStandin:
    """Gives its statuses one after the other, the last one for ever.

    Attributes:
        waited: `moves` and the longest wait of each request for a status.
    """

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self.statuses = [STATUS | status for status in statuses]
        self.waited: list[tuple[int | None, float]] = []

    async def status_env(
        self, env_id: int, moves: int | None = None, wait: float = 0.0, *, trouble: str = ""
    ) -> dict[str, Any]:
        self.waited.append((moves, wait))
        self.trouble = trouble
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    async def get(self, path: str) -> dict[str, Any]:
        return {"batch_size": 8, "max_token_len": 64}

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        if path != "/register-env":
            return {"status": "received"}
        return {**REGISTERED, "starting_step": self.statuses[0]["current_step"]}

    async def disconnect(self, env_id: int) -> None:
        """There is no trainer."""

    async def close(self) -> None:
        """There is no connection to close."""
