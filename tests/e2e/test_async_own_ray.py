"""A Ray that a run starts by itself: this machine alone reaches it, and its token is its user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(300)]

STARTED = """
import json, os, stat, sys
from pathlib import Path
from example_trainer.async_grpo.cluster import RayCluster
from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.files import private_files
from tests.listening import listeners
with private_files():
    cluster = RayCluster("own", dashboard=True)
    import ray

    @ray.remote
    def number():
        return os.getpid()

    worker = ray.get(number.remote())
    found = listeners([os.getpid(), *descendants(os.getpid())])
    tokens = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in Path(os.environ["HOME"]).rglob("*token*")}
    print(json.dumps({
        "host": cluster.host("any"), "tokens": tokens, "worker": worker in {one.pid for one in found},
        "count": len(found), "open": [one for one in found if not one.on_loopback],
    }))
    cluster.close()
    ray.shutdown()
"""


def test_it_listens_on_loopback_alone_and_its_token_is_private(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "token",
        "PYTHONPATH": str(ROOT),
        "RAY_worker_niceness": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["open"] == []
    assert told["count"] > 5, "head, node, agents and worker"
    assert told["worker"], "a worker listens too"
    assert told["host"] == "localhost"
    assert told["tokens"] == {"auth_token": "0o600"}
