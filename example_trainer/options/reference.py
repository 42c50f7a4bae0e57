"""How a reference worker asks for its work."""

from __future__ import annotations

import os
import socket

from pydantic import Field

from example_trainer.options.section import Section


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class ReferenceWorkerOptions(Section):
    """Reference worker"""

    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="what service and timeline call it; not given: host and process",
    )
    lease_seconds: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="after so many seconds without an answer, what it holds goes to another worker",
    )

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or _own_name()
