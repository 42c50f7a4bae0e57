"""The stack of start.sh with small commands in the places of the real ones: real processes, real
HTTP, no model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from example_trainer.launcher.options import StackOptions
from example_trainer.launcher.records import server_name
from example_trainer.launcher.roles import Command
from example_trainer.launcher.stack import Stack

SERVER = """
import json, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, run = int(sys.argv[1]), pathlib.Path(sys.argv[2])
def weights():
    # What the trainer below has written for this very process; without a trainer, the checkpoint's.
    path = run / f"served-{port}.json"
    sent = json.loads(path.read_text()) if path.exists() else {"instance": os.getpid(), "version": 3, "epoch": 0}
    serving = sent["instance"] == os.getpid()
    trouble = "" if serving else "waiting for its trainer's weights"
    version, epoch = (sent["version"], sent["epoch"]) if serving else (0, 0)
    return dict(instance=os.getpid(), weight_version=version, weight_epoch=epoch, serving=serving, trouble=trouble, in_flight=0)
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        (run / "joined.log").open("a").write(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.do_GET()
    def do_GET(self):
        allowed = self.headers["Authorization"] == "Bearer " + os.environ.get("ROLLOUT_API_KEY", "")
        table = run / "fleet.json"
        fleet = json.loads(table.read_text()) if table.exists() else dict(servers=[], wanted=[], published=None)
        fleet = json.dumps(dict(fleet, published_ago=time.time() - (fleet["published"] or 0)))
        refusing = (run / "refusing").read_text() if (run / "refusing").exists() else None
        stats = {"queue": {"groups": 5}, "store": {"refusing_posts": refusing}}
        answers = {"/stats": json.dumps(stats if allowed else {}), "/fleet": fleet if allowed else "{}"}
        answers |= {"/metrics": "lockstep_weight_version 3.0\\n", "/weights": json.dumps(weights())}
        body = answers.get(self.path, "{}").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
if (run / f"broken-{port}").exists():
    raise RuntimeError("no room for the model")
print("ready", flush=True)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ORPHANS = """
import subprocess, sys, time
# As vLLM's engine: a child that does not notice its parent's death.
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
"""
SLEEPER = "import time; print('sleeping', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
TRAINS = """
import json, pathlib, sys, time, urllib.request
run, ports, epoch, version, fewest = pathlib.Path(sys.argv[1]), sys.argv[2:], int(time.time() * 1000), 0, None
def put(name, value):
    (run / "draft").write_text(json.dumps(value))
    (run / "draft").replace(run / name)
while True:
    version, rows = version + 1, []
    for port in ports:
        url, kept_out = f"http://localhost:{port}", (run / f"quarantine-{port}").exists()
        try:
            with urllib.request.urlopen(url + "/weights", timeout=60) as answer:
                instance = json.load(answer)["instance"]
            if not kept_out:
                put(f"served-{port}.json", dict(instance=instance, version=version, epoch=epoch))
            standing, reason = ("quarantined", "its checksum differs") if kept_out else ("good", "")
        except OSError as error:
            standing, reason = "away", str(error)
        row = dict(url=url, standing=standing, weight_version=version, weight_epoch=epoch, since=time.time(), reason=reason)
        rows.append(row)
    good = sum(row["standing"] == "good" for row in rows)
    fewest = good if fewest is None and good == len(ports) else fewest if fewest is None else min(fewest, good)
    put("fleet.json", dict(servers=rows, wanted=[], published=time.time()))
    put("seen.json", dict(version=version, fewest=fewest))
    time.sleep(0.1)
"""
"""A trainer of servers at the ports given: the next version each 0.1 s, to each process that
answers."""
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

    def _python(
        self,
        part: str,
        code: str,
        *arguments: object,
        grace: float = 60.0,
        may_finish: bool = False,
    ) -> Command:
        words = (sys.executable, "-u", "-c", code, *map(str, arguments))
        return Command(part, words, {}, f"{part}.log", grace, may_finish)

    def service(self) -> Command:
        return self._python("service", SERVER, self.options.service_port, self.options.run)

    def vllm(self, server: int = 0) -> Command:
        return self._python(
            server_name(server), ORPHANS + SERVER, self.options.vllm_ports[server], self.options.run
        )

    def environment(self) -> Command:
        return self._python("environment", self.environment_code, may_finish=True)

    def trainer(self) -> Command:
        grace = 1.0 if self.trainer_code == STUBBORN else 60.0
        return self._python(
            "trainer",
            self.trainer_code,
            self.options.run,
            *self.options.vllm_ports,
            grace=grace,
            may_finish=True,
        )


def small_options(run: Path, ports: tuple[int, ...], parts: tuple[str, ...]) -> StackOptions:
    """Options of a stack on these ports: service, vLLM, rendezvous, further vLLM servers."""
    return StackOptions(
        run=run, parts=parts, model="owner/name", environment="arithmetic", bridge="broadcast", vllm_gpus=(), trainer_gpus=(),
        service_port=ports[0], vllm_ports=(ports[1], *ports[3:]), master_port=ports[2], metrics_port=0, steps=5, lr=None,
        batch_size=None,
        restart_interval=2, service_args=(), vllm_args=(), environment_args=(), trainer_args=(), wait=120.0, links=False,
    )  # fmt: skip
