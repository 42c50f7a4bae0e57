"""Every log of a run in one stream, each line behind the name of its part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from example_trainer.child_processes.processes import tail
from example_trainer.launcher.records import PARTS, in_order, kind_of

POLL_SECONDS = 0.2
NAMES = {
    "api.log": "service",
    "vllm.log": "vllm",
    "gsm8k.log": "environment",
    "env.log": "environment",
    "trainer.log": "trainer",
}
"""File -> part; a further vLLM server's is vllm-2.log and so on."""


class Follower:
    """Reads what is added to one file, also when it is replaced by a new one or emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position, self.inode, self.rest = 0, 0, b""
        if path.exists():
            stat = path.stat()
            self.position, self.inode = stat.st_size, stat.st_ino

    def read(self) -> list[str]:
        """The lines that were completed since the last call."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.position:
                    self.position, self.inode, self.rest = 0, stat.st_ino, b""
                file.seek(self.position)
                new = file.read()
        except FileNotFoundError:
            return []
        self.position += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def parts_with_logs(run: Path) -> tuple[str, ...]:
    """The parts that every stack has, and the further vLLM servers of this run."""
    return in_order((*PARTS, *(log.stem for log in run.glob("vllm-*.log") if kind_of(log.stem))))


def paths_of(run: Path, parts: Iterable[str]) -> dict[Path, str]:
    """The logs of a run, whether they are there yet or not, and the part behind each."""
    wanted = set(parts)
    found = {run / name: part for name, part in NAMES.items() if part in wanted}
    found |= {run / f"{part}.log": part for part in wanted if kind_of(part) == "vllm"}
    if "vllm" in wanted:
        found[run / "trainer" / "vllm.log"] = "vllm"  # of a server that the trainer owns
    return found


def show(
    run: Path,
    parts: Iterable[str],
    lines: int,
    follow: bool,
    say: Callable[[str], None],
    done: Callable[[], bool] = lambda: False,
) -> None:
    """Print the last lines of each log, then what is added to them, until interrupted.

    Args:
        run: the run's folder.
        parts: whose logs.
        lines: how many old lines of each.
        follow: go on with new lines.
        say: gets each line.
        done: asked between two rounds; True ends it.
    """
    paths = paths_of(run, parts)
    followers = {Follower(path): part for path, part in paths.items()}
    for path, part in paths.items():
        for line in tail(path, lines, columns=2000):
            say(f"{part:<11} | {line}")
    while follow and not done():
        for follower, part in followers.items():
            for line in follower.read():
                say(f"{part:<11} | {line}")
        time.sleep(POLL_SECONDS)
