"""Weights go through a parameter server by every route that this machine's GPUs allow, and arrive
as the trainer has them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_every_route_brings_the_same_weights(tmp_path: Path) -> None:
    """Processes of their own: trainer, parameter server, light vLLM servers.

    The benchmark compares their checksums.
    """
    command = [
        sys.executable,
        "bench/parameter_server.py",
        "--output",
        str(tmp_path),
        "--tiny",
        "--updates",
        "2",
    ]
    done = subprocess.run(
        command, cwd=ROOT, timeout=280, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "parameter_server.json").read_text())["servers"]
    assert {"one GPU, 1", "one GPU, 2", "host memory, 1"} <= found.keys()
    assert all(
        found[name]["read_in_place"] == int(name[-1]) for name in found if name[-1].isdigit()
    ), found
