"""The stack of start.sh with small commands in the places of the real ones: real processes, real HTTP, no model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.ops.options import StackOptions
from scripts.ops.parts import server_name
from scripts.ops.stack import Stack
from scripts.quickstart.plan import Command

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        key = os.environ.get("ROLLOUT_API_KEY", "")
        status = json.dumps({"queue_size": 5} if self.headers["Authorization"] == "Bearer " + key else {})
        answers = {"/status": status, "/metrics": "lockstep_weight_version 3.0\\n"}
        body = answers.get(self.path, "{}").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("ready", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ORPHANS = """
import subprocess, sys, time
# As vLLM's engine: a child that does not notice its parent's death.
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
"""
SLEEPER = "import time; print('sleeping', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
FAILS = "raise RuntimeError('no rollouts for me')"
FINISHES = "print('Training complete')"


@dataclass(frozen=True)
class SmallStack(Stack):
    """Its commands are Python programs, given here.

    Attributes:
        trainer_code, environment_code: what those parts run.
    """

    trainer_code: str = SLEEPER
    environment_code: str = SLEEPER

    def _python(self, part: str, code: str, *arguments: object, grace: float = 5.0, may_finish: bool = False) -> Command:
        words = (sys.executable, "-u", "-c", code, *map(str, arguments))
        return Command(part, words, {}, f"{part}.log", grace, may_finish)

    def service(self) -> Command:
        return self._python("service", SERVER, self.options.service_port)

    def vllm(self, server: int = 0) -> Command:
        return self._python(server_name(server), ORPHANS + SERVER, self.options.vllm_ports[server])

    def environment(self) -> Command:
        return self._python("environment", self.environment_code, may_finish=True)

    def trainer(self) -> Command:
        grace = 1.0 if self.trainer_code == STUBBORN else 5.0
        return self._python("trainer", self.trainer_code, grace=grace, may_finish=True)


def small_options(run: Path, ports: tuple[int, ...], parts: tuple[str, ...]) -> StackOptions:
    """Options of a stack on these ports: service, vLLM, rendezvous, further vLLM servers."""
    return StackOptions(
        run=run, parts=parts, model="owner/name", environment="arithmetic", bridge="broadcast", vllm_gpus=(), trainer_gpus=(),
        service_port=ports[0], vllm_ports=(ports[1], *ports[3:]), master_port=ports[2], metrics_port=0, steps=5, lr=None,
        batch_size=None,
        restart_interval=2, service_args=(), vllm_args=(), environment_args=(), trainer_args=(), wait=30.0, links=False,
    )  # fmt: skip
