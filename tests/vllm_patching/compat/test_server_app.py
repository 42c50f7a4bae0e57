"""A server that is stopped while its engine loads ends at once, and its engine with it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SERVER = """
import multiprocessing, signal, sys, time, types
from vllm_patching.compat.server_app import end_at_once_while_loading

def load():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(120)

if __name__ == "__main__":
    module = types.SimpleNamespace(setup_server=lambda: None)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    loaded = end_at_once_while_loading(module)
    module.setup_server()
    engine = multiprocessing.get_context("fork").Process(target=load)
    engine.start()
    if sys.argv[1] == "loaded":
        loaded()
        engine.kill()
    print("ready", flush=True)
    time.sleep(120)
"""
"""A server whose engine ignores SIGTERM."""
SOON = 60


@pytest.mark.parametrize(
    ("state", "status"),
    [("loading", 128 + signal.SIGTERM), ("loaded", 7)],
    ids=["loading", "loaded"],
)
def test_sigterm_ends_the_server_and_its_engine(state: str, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, state], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        server.send_signal(signal.SIGTERM)
        # Both processes hold the pipe, which ends with the last of them.
        written, _ = server.communicate(timeout=SOON)
    assert server.returncode == status
    assert (written == "[vLLM Patch] SIGTERM while the model loads: the server ends\n") == (
        state == "loading"
    )
