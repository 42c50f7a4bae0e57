"""The status with which a vLLM server ends, whether it was stopped or its engine died."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.nightly

# vLLM's own launcher and its watch over the engine; the engine is a record of whether it has died.
SERVE = """
import argparse, asyncio, contextlib, logging, sys, types
import uvloop
from fastapi import FastAPI
from example_trainer.vllm_api_server import run_and_clean_up
from vllm_patching.compat.server_app import server_module
from vllm_patching.protocol.timeline import open_timeline
from vllm_patching.server.routes import LockstepService
from vllm_patching.server.timeline import ServerTimeline

module = server_module()
engine = types.SimpleNamespace(errored=False, is_running=True)
engine.vllm_config = types.SimpleNamespace(shutdown_timeout=0)

def die(**_):
    engine.errored, engine.is_running = True, False

engine.shutdown = die
service = LockstepService()
service.engine = engine

@contextlib.asynccontextmanager
async def lifespan(app):
    print("ready", flush=True)
    if sys.argv[1] == "crash":
        die()
    yield

async def run_server(args, **arguments):
    app = FastAPI(lifespan=lifespan)
    app.state.engine_client = engine
    await (await module.serve_http(app, sock=None, host="localhost", port=args.port, **arguments))

args = argparse.Namespace(port=int(sys.argv[2]))
timeline = ServerTimeline(open_timeline("generator", "test"))
logger = logging.getLogger("vllm.lockstep.server")
uvloop.run(run_and_clean_up(run_server, args, service, timeline, logger))
"""


@pytest.mark.parametrize(("end", "status"), [("crash", 1), (signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_only_a_server_that_nobody_stopped_ends_with_an_error(
    end: str | signal.Signals, status: int, free_port: Callable[[], int]
) -> None:
    """Its engine is dead in each case: vLLM ends it before it stops its HTTP server."""
    command = [sys.executable, "-c", SERVE, str(end), str(free_port())]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            # Uvicorn logs this when its socket and vLLM's handlers of signals are in place. It cannot
            # stop before.
            if "Uvicorn running on" in line and isinstance(end, signal.Signals):
                server.send_signal(end)
    log = "".join(lines)
    assert server.returncode == status, log
    line = "The server ends with status 1: vLLM's engine process has died; restart the server"
    assert (line in log) == (status == 1)
