"""A stand-in for the four processes, small enough to break at will: real processes, real HTTP, no
model.

    python small_plan.py OUTPUT STEPS [FAULT]

runs the quick start's own orchestration over them. FAULT: `vllm-dies`, `trainer-fails`,
`trainer-stalls`, `short`, `never-ready`, `not-served`, `environment-fails`, `environment-done`, or
`wait`, which trains for ever.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from example_trainer.launcher.quickstart.options import Options
from example_trainer.launcher.quickstart.plan import Plan
from example_trainer.launcher.roles import Command


@dataclass(frozen=True)
class SmallPlan(Plan):
    """The same stack with small commands."""

    fault: str = ""

    def small(self, name: str, *arguments: object) -> Command:
        words = (sys.executable, "-u", __file__, "--be", name, *map(str, arguments))
        served = self.options.steps - (self.fault == "not-served")
        variables = {"SMALL_STACK": str(self.options.output), "SMALL_STACK_STEPS": str(served)}
        return Command(name, words, variables, f"{name}.log", grace=2.0)

    def service(self) -> Command:
        return self.small("service", self.ports.service)

    def vllm(self) -> Command:
        return self.small("vllm", self.ports.vllm, self.fault)

    def environment(self) -> Command:
        # The real one ends by itself once the trainer has reached its last step.
        return replace(self.small("environment", self.fault), may_finish=True)

    def evaluation(self, which: str, result: Path) -> Command:
        return self.small("evaluation", which, result)

    def trainer(self) -> Command:
        return self.small(
            "trainer", self.trainer_folder / "metrics.jsonl", self.options.steps, self.fault
        )


def serve(port: int, fault: str = "") -> None:
    started = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = fault != "never-ready" and (
                time.monotonic() - started > 0.3 or self.path == "/"
            )
            body = json.dumps({"weight_version": 3}).encode()
            self.send_response(200 if ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if fault == "vllm-dies":
        threading.Timer(
            2.5, lambda: (print("RuntimeError: out of tokens", flush=True), os._exit(9))
        ).start()
    server.serve_forever()


def evaluate(which: str, result: str) -> None:
    before = which == "before"
    figures = {"correct": 100 if before else 180, "num_problems": 200, "mean_response_tokens": 12.0}
    Path(result).write_text(
        json.dumps(
            figures | {"weight_version": 0 if before else int(os.environ["SMALL_STACK_STEPS"])}
        )
    )
    answer = "\\boxed{4}" if before else "2 + 3 = 5. \\boxed{5}"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    sample = {"question": "What is 2 [plus] 3?", "correct": not before, "messages": messages}
    Path(result).with_suffix(".samples.jsonl").write_text(json.dumps(sample) + "\n")


def environment(fault: str = "") -> None:
    if fault == "environment-fails":
        sys.exit(4)
    time.sleep(0.3 if fault == "environment-done" else 600)


def train(metrics: str, steps: str, fault: str = "") -> None:
    path = Path(metrics)
    path.parent.mkdir(parents=True)
    for step in range(1, int(steps) + 1):
        if fault == "trainer-fails" and step == 2:
            print("ERROR the batch holds nothing to train on", flush=True)
            sys.exit(1)
        if fault == "short" and step == 2:
            return
        with path.open("a") as file:
            row = {
                "step": step,
                "reward_mean": 0.1,
                "weight_version": step,
                "params_mapped": 5,
                "params_total": 5,
            }
            file.write(json.dumps(row) + "\n")
        # A run that another process is to break must not end before that process has come so far.
        while fault in ("trainer-stalls", "wait", "vllm-dies", "environment-fails") and step == 2:
            time.sleep(0.1)
        time.sleep(0.05)


def main(output: str, steps: str, fault: str = "") -> int:
    from rich.console import Console

    from example_trainer.launcher.quickstart import __main__ as command
    from example_trainer.launcher.quickstart import run

    # Even a short limit gives a busy machine the time to start a process.
    run.STALL_SECONDS = 20.0 if fault == "trainer-stalls" else 120.0
    run.VLLM_SECONDS = 20.0 if fault == "never-ready" else 120.0
    options = Options(
        "broadcast",
        int(steps),
        "owner/name",
        (),
        0.1,
        0,
        (),
        200,
        Path(output),
        False,
        0.0,
        "arithmetic",
    )
    return command.guarded(
        run.Quickstart(options, Console(), lambda given, ports: SmallPlan(given, ports, fault))
    )


ROLES = {
    "service": lambda port: serve(int(port)),
    "vllm": lambda port, fault: serve(int(port), fault),
}
ROLES |= {"environment": environment, "evaluation": evaluate, "trainer": train}

if __name__ == "__main__":
    if sys.argv[1] == "--be":
        ROLES[sys.argv[2]](*sys.argv[3:])  # type: ignore[operator]
    else:
        sys.exit(main(*sys.argv[1:]))
