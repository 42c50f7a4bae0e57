"""A server that lost its adapter, as a restart leaves it, is distinguished from one that only gets
a new version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from example_trainer.models.lora.settings import LoraSettings
from example_trainer.weight_bridge.lora import LoraBridge, LoraServer


class Answering(LoraServer):
    """Takes every adapter, and serves what it was given last unless it is restarted."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", 1, 1.0)
        self.current: dict[str, Any] | None = None

    def call(self, path: str, body: dict[str, Any] | None, what: str, **_: Any) -> dict[str, Any]:
        assert body is not None
        self.current = {"name": f"v{body['version']}"}
        return self.current | {"paths_in_use": [], "seconds": {}}

    def watch(self, path: str, what: str) -> dict[str, Any]:
        return {"current": self.current}


def test_a_restart_is_a_join_and_a_new_version_is_none(tmp_path: Path) -> None:
    servers = [Answering(), Answering()]
    bridge = LoraBridge(servers, LoraSettings(4, 8.0, 0.0, ("q_proj",)), tmp_path, "base")
    for version in (0, 1):
        for server in servers:
            bridge._load(server, tmp_path, version, "sum")
    assert bridge.joins == 2
    servers[1].current = None
    assert [server.has_lost_adapter() for server in servers] == [False, True]
    servers[1].serves = None  # as keep_serving does
    bridge._load(servers[1], tmp_path, 1, "sum")
    assert bridge.joins == 3
