"""What other code imports of the service by the public package's names, and `app` for uvicorn's command line.

The service itself is in the rooms beside this file; `app.application` puts it together.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from atroposlib.api.app.application import make_app
from atroposlib.api.app.service import RolloutService
from atroposlib.api.gate.access import Access
from atroposlib.api.gate.gate import RequestLimits
from atroposlib.api.models.groups import ScoredData
from atroposlib.api.models.records import Registration
from atroposlib.api.models.requests import EnvIdentifier, RegisterEnv
from atroposlib.api.store.store import MemoryStore

__all__ = ["EnvIdentifier", "RegisterEnv", "Registration", "ScoredData"]

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """`uvicorn atroposlib.api.server:app` serves from memory; `python -m atroposlib.cli.run_api` has a store, and options."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    logger.warning("app: everything is kept in memory only; python -m atroposlib.cli.run_api keeps it on the disk")
    access = Access(os.environ.get("ROLLOUT_API_KEY") or None)
    globals()["app"] = make_app(RolloutService(MemoryStore()), RequestLimits(access=access))
    return globals()["app"]
