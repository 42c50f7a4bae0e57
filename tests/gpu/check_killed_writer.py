"""A process that waits for another one's CUDA event, if that one is killed before its GPU comes
there.

    python tests/gpu/check_killed_writer.py [--json FILE]

A writer opens the reader's memory, enqueues a long kernel and a write, and records its event behind
them. It is killed by SIGKILL while the kernel runs. The reader waits in one of two ways. Its stream
waits for the event and it synchronises (nothing ends that). Or it asks the event with a deadline
(transport.shared_memory.reached_in_time). Every reader is a process of its own, which is killed
when it takes too long. Takes two to five minutes; needs PyTorch, one GPU, no vLLM and no pytest.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.gpu.checks import JSON, NEEDS_GPU, write_results
from bench.measured import command_line, measured
from vllm_patching.transport.shared_memory import (
    SharedMemoryError,
    export_cuda_ipc,
    open_event,
    open_handles,
    reached_in_time,
    share_event,
)

SLEEP_SECONDS = 40.0
"""Seconds of the writer's kernel, were the writer not killed."""
DEADLINE = 5.0
"""Seconds that the bounded way waits."""
PATIENCE = 25.0
"""Seconds after which a reader that has not answered counts as hanging; less than the kernel
runs."""
START_SECONDS = 120.0
WAYS = ("stream waits for the event", "host asks with a deadline")


@dataclass
class Row:
    """The outcome of one reader.

    Attributes:
        case: what was done to the writer.
        way: how the reader waited.
        seconds: from the question to its answer; None: it never answered.
        outcome: its message.
        good: whether it is what the way must do.
    """

    case: str
    way: str
    seconds: float | None
    outcome: str
    good: bool


def cycles(seconds: float) -> int:
    """Return the argument of torch.cuda._sleep for about that time on this GPU."""
    sample = 200_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(sample)
    end.record()
    torch.cuda.synchronize()
    return int(sample * seconds * 1e3 / begin.elapsed_time(end))


def writer(pipe: Connection) -> None:
    """Opens the reader's memory; for each (seconds, value): a kernel of that length, a write of the
    value, the event.
    """
    weights = open_handles(pipe.recv())["w"]
    event, handle = share_event(weights.device)
    per_second = cycles(1.0)
    pipe.send(handle)
    while True:
        seconds, value = pipe.recv()
        torch.cuda._sleep(int(per_second * seconds))
        weights.fill_(value)
        event.record()
        pipe.send("recorded")


def reader(pipe: Connection) -> None:
    """Owns the memory. Answers each handle with the memory's, and each way with what it saw."""
    weights = torch.nn.Parameter(torch.zeros(4_000_000, device="cuda"), requires_grad=False)
    exported = export_cuda_ipc({"w": weights})
    event: torch.cuda.Event | None = None
    while True:
        kind, value = pipe.recv()
        if kind == "export":
            pipe.send(exported)
        elif kind == "open":
            event = open_event(value, weights.device)
            pipe.send("opened")
        else:
            assert event is not None
            pipe.send(_look(event, weights, value))


def _look(event: torch.cuda.Event, weights: torch.Tensor, way: str) -> tuple[str, float]:
    """Return the outcome of the wait, and the memory's highest value (-1 if it was not read)."""
    try:
        if way == WAYS[0]:
            event.wait()
        elif not reached_in_time(event, DEADLINE):
            return "not reached within the deadline", float(weights.max())
        return "reached", float(weights.max())
    except (RuntimeError, SharedMemoryError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}", -1.0


class Pair:
    """A reader, and the writers that come and go."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.reader, self._reader = self._start(reader)
        self.new_writer()

    def new_writer(self) -> None:
        """Start a writer whose event the reader follows from now on."""
        self.writer, self._writer = self._start(writer)
        self.writer.send(self.ask("export", None, START_SECONDS))
        self.ask("open", _answer(self.writer, START_SECONDS, "the writer's event"), START_SECONDS)

    def ask(self, kind: str, value: Any, seconds: float) -> Any:
        """The reader's answer. Raises TimeoutError."""
        self.reader.send((kind, value))
        return _answer(self.reader, seconds, f"the reader's answer to {kind}")

    def write(self, seconds: float, value: float) -> None:
        """Have the writer enqueue and record; returns when that is done, long before the GPU comes
        there.
        """
        self.writer.send((seconds, value))
        _answer(self.writer, START_SECONDS, "the writer")

    def kill_writer(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._writer.kill()
        self._writer.join(60)

    def close(self) -> None:
        for process in (self._writer, self._reader):
            process.kill()
            process.join(60)

    def _start(self, target: Callable[[Connection], None]) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        return ours, process


def _answer(pipe: Connection, seconds: float, what: str) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"no {what} within {seconds:g} s")
    return pipe.recv()


def writer_lives(pair: Pair, way: str) -> Row:
    """The write comes after a second, and is seen by every reader that waited."""
    pair.write(1.0, 2.0)
    return _judge(
        pair, "writer lives", way, lambda said, highest: (said, highest) == ("reached", 2.0)
    )


def killed_before(pair: Pair, way: str) -> Row:
    """Killed with the kernel under way, before the reader begins to wait."""
    pair.write(SLEEP_SECONDS, 3.0)
    pair.kill_writer()
    return _judge(pair, "killed before the reader waits", way, lambda said, highest: way == WAYS[1])


def killed_meanwhile(pair: Pair, way: str) -> Row:
    """Killed when the reader has been waiting for a second."""
    pair.write(SLEEP_SECONDS, 4.0)
    pair.reader.send(("look", way))
    time.sleep(1.0)
    pair.kill_writer()
    return _judge(
        pair, "killed while the reader waits", way, lambda said, highest: way == WAYS[1], asked=True
    )


def next_writer(pair: Pair, way: str) -> Row:
    """After a killed one another writer comes, and the same reader sees what it writes."""
    pair.new_writer()
    pair.write(0.5, 5.0)
    return _judge(
        pair,
        "another writer after it",
        way,
        lambda said, highest: (said, highest) == ("reached", 5.0),
    )


def _judge(
    pair: Pair, case: str, way: str, good: Callable[[str, float], bool], asked: bool = False
) -> Row:
    """Ask the reader, unless it is looking already.

    A row that only describes the driver is never bad.
    """
    begun = time.monotonic()
    try:
        said, highest = (
            _answer(pair.reader, PATIENCE, "answer") if asked else pair.ask("look", way, PATIENCE)
        )
    except (TimeoutError, EOFError) as error:
        return Row(
            case,
            way,
            None,
            f"HANGS or ended: {error}",
            way == WAYS[0] and case.startswith("killed"),
        )
    seconds = time.monotonic() - begun
    fine = good(said, highest) or (way == WAYS[0] and case.startswith("killed"))
    return Row(case, way, seconds, f"{said}; highest value read: {highest:g}", fine)


def latency() -> Row:
    """Time a query when there is nothing to wait for any more."""
    event, _ = share_event(torch.device("cuda", 0))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(1000):
        reached_in_time(event, DEADLINE)
    each = (time.perf_counter() - begun) / 1000
    return Row("event reached already", WAYS[1], each, f"{each * 1e6:.1f} µs", each < 1e-3)


def rows() -> list[Row]:
    """Every case in both ways; a reader that hangs is replaced."""
    found = [latency()]
    for way in WAYS:
        for after in (killed_before, killed_meanwhile):
            pair = Pair()
            try:
                for step in (writer_lives, after, next_writer):
                    row = step(pair, way)
                    found.append(row)
                    print(_line(row), flush=True)
                    if row.seconds is None:
                        break
            finally:
                pair.close()
    return found


def _line(row: Row) -> str:
    took = "  never" if row.seconds is None else f"{row.seconds:7.3f}"
    return f"{'✓' if row.good else '✗'} {row.case:32} {row.way:28} {took} s  {row.outcome}"


def main() -> int:
    """Returns the process's status."""
    options = command_line(__doc__, JSON).parse_args()
    if not torch.cuda.is_available():
        print(NEEDS_GPU)
        return 2
    found = rows()
    print("\n".join(["", *map(_line, found)]))
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    dated = [{"measured": measured(), **asdict(row)} for row in found]
    write_results(options, {**facts, "rows": dated})
    return int(not all(row.good for row in found))


if __name__ == "__main__":
    sys.exit(main())
