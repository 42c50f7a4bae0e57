"""The stage on which faults are done to a server and its trainers, and the judgement of what came
of each.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.processes import BenchError, Worker, crossed_gpus, tail, wait_all
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import READY_SECONDS, ServerOptions, VllmServer
from bench.measured import measured

PROMPTS = ([5, 6, 7, 8], [900, 12, 40])
LOGPROB_TOLERANCE = 0.02
"""Largest difference of two logprobs of the same weights and tokens; another set of weights differs
by whole units."""


@dataclass
class Outcome:
    """The outcome of one fault.

    Attributes:
        fault: its kind, target and time.
        limit: seconds within which the other side must have ended the update.
        seconds: how long it took.
        error: the survivor's message.
        must_name: what the error must hold, as regular expressions by what they stand for.
        server: `old version`, `unhealthy`, `gone` or `new version`, after the fault.
        next_attempt: how the next update went; `ok`, or why not.
        problems: what keeps the row from being good; empty if it is.
        measured: commit, date and run.
    """

    fault: str
    limit: float = 0.0
    seconds: float = 0.0
    error: str = ""
    must_name: dict[str, str] = field(default_factory=dict)
    server: str = ""
    next_attempt: str = ""
    problems: list[str] = field(default_factory=list)
    measured: dict[str, str] = field(default_factory=measured)

    def judge(self, allowed: tuple[str, ...]) -> None:
        """Collect the problems. `allowed`: what the server may be after the fault."""
        if not self.seconds > 0:
            self.problems.append("nothing was measured")
        if self.seconds > self.limit:
            self.problems.append(f"took {self.seconds:.1f} s, more than {self.limit:g}")
        for what, pattern in self.must_name.items():
            if not re.search(pattern, self.error, re.IGNORECASE):
                self.problems.append(f"the error does not name the {what}")
        if self.server not in allowed:
            self.problems.append(f"the server is {self.server}, not {' or '.join(allowed)}")
        if self.next_attempt != "ok":
            self.problems.append(f"the next attempt: {self.next_attempt}")

    def to_json(self) -> dict[str, Any]:
        """For the results file, without names of this machine or paths on it."""
        told = re.sub(rf"\b{re.escape(socket.gethostname())}(?=:\d)", "HOST", self.error)
        return {
            **vars(self),
            "error": re.sub(r"/\S*/model\b", "MODEL", told),
            "good": not self.problems,
        }


class Stage:
    """A server that serves a known version, and trainers that can be stopped at a point."""

    def __init__(
        self,
        shape: str,
        model: Path,
        output: Path,
        device: str,
        tp: int,
        timeout: float,
        eager: bool = True,
        name: str = "vllm",
        crossed: bool = False,
        beside: bool = False,
    ) -> None:
        """
        Args:
            shape: a key of SHAPES; `model` is the folder with its config.json and tokenizer.
            output: where logs go.
            device: `cuda` or `cpu`.
            tp: vLLM's ranks. The trainer is one process, on the GPU behind them.
            timeout: seconds for each phase of an update.
            eager: without compilation and CUDA graphs.
            name: the server's, for its log.
            crossed: the trainer has as many ranks as vLLM, each on the GPU of the next of vLLM's.
            beside: the trainer's copy of the weights is on vLLM's GPU.
        """
        self.shape, self.output, self.device, self.timeout, self.tp = (
            shape,
            output,
            device,
            timeout,
            tp,
        )
        self._ranks, self._beside = tp if crossed else 1, beside
        gpus = ",".join(map(str, range(tp))) if device == "cuda" else ""
        options = ServerOptions(
            gpus, tp, eager=eager, bridge_timeout=timeout, cache_gib=4, max_num_seqs=32
        )
        self._model, self._options, self._name, self._starts = model, options, name, 0
        self.server = VllmServer(name, model, output, options)
        self._trainers: list[Worker] = []
        self._ahead: dict[str, list[Worker]] = {"broadcast": [], "single_copy": []}
        self._kept: dict[str, Worker] = {}
        self._kinds: dict[int, str] = {}
        self._count = 0

    def wait(self) -> None:
        """Return when the server generates."""
        wait_all({self.server.name: self.server.ready}, READY_SECONDS)

    def restart_server(self) -> None:
        """Start a server in the place of the present one, which must have been killed; returns at
        once.
        """
        self._starts += 1
        log = self.server.log_path
        log.rename(log.with_name(f"{log.stem}-{self._starts}.log"))
        self.server = VllmServer(
            self._name, self._model, self.output, self._options, port=self.server.port
        )

    def usable(self) -> bool:
        """Report if the server can go on after a row that could not be judged."""
        try:
            return self.server.poll() is None and not self.server.state()["engine_dead"]
        except OSError:
            return False

    def close(self) -> None:
        """Stop everything."""
        for worker in self._trainers:
            worker.stop()
        self.server.stop()

    def end_row(self) -> None:
        """Stop the trainers of a row, whose memory the next ones need; trainers that load ahead
        stay, and one that is well.
        """
        staying = [
            *self._kept.values(),
            *(worker for ahead in self._ahead.values() for worker in ahead),
        ]
        for worker in self._trainers:
            if worker not in staying:
                worker.stop()
        self._trainers = staying

    def keep(self, worker: Worker) -> None:
        """A trainer whose last update was good may serve in the next row."""
        self._kept[self._kinds[worker.name]] = worker

    # -- trainers

    def trainer(self, kind: str = "broadcast") -> Worker:
        """A loaded trainer, new or from an earlier row.

        The next ones of its kind begin to load at the same time.
        """
        kept = self._kept.pop(kind, None)
        if kept is not None and kept.poll() is None:
            return kept
        ahead = self._ahead[kind]
        worker = ahead.pop(0) if ahead else self._start_trainer(kind)
        while len(ahead) < (2 if self.device == "cuda" else 1):
            ahead.append(self._start_trainer(kind))
        worker.answer(180, "load")
        return worker

    def joined(self, mode: str) -> Worker:
        """A trainer that has joined by `direct`, `overlapped` or `single_copy` and served two sets
        of weights in turn.
        """
        worker = self.trainer("single_copy" if mode == "single_copy" else "broadcast")
        self.connect(worker, mode)
        worker.ask("sync", timeout=60, count=1)
        return worker

    def connect(self, worker: Worker, mode: str) -> Any:
        """Join, or join again."""
        options = {} if mode == "single_copy" else {"transfer": mode}
        kind = "single_copy" if mode == "single_copy" else "broadcast"
        return worker.ask("connect", timeout=self.timeout + 60, kind=kind, **options)

    def hold(self, worker: Worker, point: str) -> None:
        """Begin an update and return when the trainer has stopped at the point."""
        worker.send("sync_held", at=point)
        message = worker.message(self.timeout + 30, point)
        if message.get("event") != point:
            raise BenchError(f"{worker.name} did not stop at {point} but said {message}")

    @staticmethod
    def release(worker: Worker) -> None:
        """Let a held trainer go on."""
        worker.write("go")

    def _start_trainer(self, kind: str) -> Worker:
        self._count += 1
        environment = {"OMP_NUM_THREADS": "1"}
        if self.device == "cuda":
            apart = crossed_gpus(self.tp) if self._ranks > 1 else [str(self.tp)]
            environment["CUDA_VISIBLE_DEVICES"] = (
                "0" if self._beside or kind == "single_copy" else ",".join(apart)
            )
        arguments = trainer_arguments(self.shape, self.server.port, self.device, self.timeout)
        log = self.output / f"trainer-{self._count:02d}.log"
        worker = Worker(
            f"trainer {self._count}",
            "tests.gpu.fault_trainer",
            arguments,
            log,
            environment,
            self._ranks,
        )
        self._trainers.append(worker)
        self._kinds[worker.name] = kind
        worker.send("load", seed=self._count)
        return worker

    # -- what is looked at

    def snapshot(self) -> dict[str, Any]:
        """Version, checksums and greedy completions of what is served."""
        state = self.server.state()
        return {
            "version": state["weight_version"],
            "checksums": state["checksums"],
            "greedy": [self.server.greedy(prompt) for prompt in PROMPTS],
        }

    def settled(self, limit: float) -> float:
        """Seconds until no update is in progress. Raises BenchError after twice the limit."""
        started = time.monotonic()
        while True:
            state = self.server.state()
            if state["target_version"] is None:
                return time.monotonic() - started
            if time.monotonic() - started > 2 * limit:
                raise BenchError(
                    f"the server is still in phase {state['state']} after {2 * limit:g} s"
                )
            time.sleep(0.1)

    def verdict(self, before: dict[str, Any]) -> str:
        """Compare the served weights with a snapshot; `unhealthy` only if the server also refuses
        to generate.
        """
        if self.server.poll() is not None or self.server.health() == 0:
            return "gone"
        state = self.server.state()
        if state["engine_dead"]:
            return "gone" if self.server.health() != 200 else "healthy though its engine is dead"
        if state["state"] == "unhealthy":
            try:
                self.server.greedy(PROMPTS[0], max_tokens=1)
            except BenchError:
                return (
                    "unhealthy"
                    if self.server.health() == 503
                    else f"unhealthy, but /health says {self.server.health()}"
                )
            return "unhealthy, but it generates"
        if state["weight_version"] != before["version"]:
            return "new version"
        if state["checksums"] != before["checksums"]:
            return "old version by name, other checksums"
        for (tokens, logprobs), (old_tokens, old_logprobs) in zip(
            self.snapshot()["greedy"], before["greedy"], strict=True
        ):
            if tokens[0] != old_tokens[0] or abs(logprobs[0] - old_logprobs[0]) > LOGPROB_TOLERANCE:
                return f"old version by name, other logprobs ({logprobs[0]:.3f}, before {old_logprobs[0]:.3f})"
        return "old version"

    def said(self, mark: int) -> str:
        """The lines on updates that the server has logged since `mark` (see log_mark), and its last
        error.
        """
        text = self.server.log_path.read_bytes()[mark:].decode(errors="replace")
        lines = [line[line.index("[Bridge]") :] for line in text.splitlines() if "[Bridge]" in line]
        lines = [line for line in lines if re.search(r"failed|refus|gave|UNHEALTHY|died", line)]
        return "\n".join(dict.fromkeys(lines))[:2000]

    def log_mark(self) -> int:
        """Where the server's log ends now."""
        return self.server.log_path.stat().st_size

    def attempt(self, worker: Worker, mode: str, connect: bool) -> str:
        """Update once more, after joining again on request, and compare the served weights with the
        sent ones: `ok` or the fault.
        """
        try:
            if connect:
                self.connect(worker, mode)
            worker.ask("sync", timeout=self.timeout + 60, count=1)
            found = worker.ask("check", timeout=60)
        except BenchError as error:
            return str(error).splitlines()[0]
        health = self.server.health()
        if not (found["checksums_equal"] and found["new_not_old"] and health == 200):
            return f"checksums equal: {found['checksums_equal']}, new weights: {found['new_not_old']}, /health: {health}"
        self.keep(worker)
        return "ok"


ABSENCE = re.compile(
    r".*(\[Fleet\] waiting for servers:|looking whether the server was restarted).*"
)
"""Log lines of a trainer whose server has gone or does not move: one that broadcasts, and one that
shares its memory.
"""


def note_absence(outcome: Outcome, trainer: Worker, mark: int) -> None:
    """Wait until a trainer logs, behind position `mark` of its log, that it has no server; note in
    the row when and how.
    """
    started = time.monotonic()
    while not (
        found := ABSENCE.findall(
            text := trainer.log_path.read_bytes()[mark:].decode(errors="replace")
        )
    ):
        if time.monotonic() - started > 2 * outcome.limit:
            outcome.problems.append(
                f"the trainer did not say that its server has gone: {tail(trainer.log_path)}"
            )
            break
        time.sleep(0.1)
    outcome.seconds = time.monotonic() - started
    told = (
        [line for line in text.splitlines() if "[Fleet]" in line or "[Bridge]" in line]
        if found
        else []
    )
    outcome.error = "\n".join(told)[:1500]


def stopped_for(send: Callable[[int], None], seconds: float, meanwhile: Callable[[], Any]) -> Any:
    """SIGSTOP, do `meanwhile`, and SIGCONT after `seconds` or when that has ended, whichever is
    later.
    """
    started = time.monotonic()
    send(signal.SIGSTOP)
    try:
        answer = meanwhile()
        time.sleep(max(0.0, started + seconds - time.monotonic()))
    finally:
        send(signal.SIGCONT)
    return answer
