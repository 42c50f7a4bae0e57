"""A checkpoint folder of the light servers' model, without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fleet_server import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
