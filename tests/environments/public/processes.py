"""The processes of the comparison: a virtual environment for both SDKs, the service, the stand-in,
an environment file.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.public_server import PUBLIC
from example_trainer.child_processes.processes import Supervisor
from tests import inference_standin

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "runs" / "bench" / "their-environments"
NEEDS = (
    # transformers 5 gives a table where environments of that time expect a list of ids
    *(
        "transformers<5",
        "datasets",
        "gymnasium<1.1",
        "langdetect",
        "reasoning-gym",
        "flask",
        "latex2sympy2_extended",
    ),
    *(
        "scipy",
        "scikit-learn",
        "toml",
        "xmltodict",
        "pyyaml",
        "pandas",
        "python-dotenv",
        "pillow",
        "nltk",
    ),
    # what our SDK needs
    *(
        "fastapi",
        "uvicorn",
        "pydantic",
        "httpx",
        "openai",
        "orjson",
        "prometheus-client",
        "numpy",
        "jinja2",
        "rich",
    ),
)
"""Imports of environment files, from the package registry."""


@dataclass(frozen=True)
class Side:
    """One of the two SDKs.

    Attributes:
        name: `public` or `ours`.
        path: folder that is put on PYTHONPATH: it holds `environments` of the clone and, for ours,
            our package.
    """

    name: str
    path: Path


def python() -> Path:
    """The interpreter that has the public SDK and what environments need; made at the first call.

    Raises:
        subprocess.SubprocessError: pip failed or took longer than 20 minutes.
    """
    found = FOLDER / "venv" / "bin" / "python"
    marker = FOLDER / "venv" / "ready"
    if not marker.exists():
        print(f"installing {PUBLIC} and {len(NEEDS)} packages in {FOLDER} …", flush=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", FOLDER / "venv"], check=True, timeout=120
        )
        install: list[str | Path] = [
            found,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*install, PUBLIC, *NEEDS], check=True, timeout=1200)
        marker.touch()
    return found


def sides(clone: Path, work: Path) -> tuple[Side, Side]:
    """Folders for PYTHONPATH: both with the clone's `environments`, one with our `atroposlib`,
    which hides the public one.
    """
    made = []
    for name in ("public", "ours"):
        folder = work / f"path-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        link(folder / "environments", clone / "environments")
        if name == "ours":
            # A copy: the checkout may change while this runs.
            shutil.rmtree(folder / "atroposlib", ignore_errors=True)
            shutil.copytree(ROOT / "atroposlib", folder / "atroposlib")
        made.append(Side(name, folder))
    return made[0], made[1]


def link(place: Path, target: Path) -> None:
    if not place.is_symlink():
        place.symlink_to(target.resolve(), target_is_directory=True)


def wait_for(what: str, probe: Callable[[], bool], seconds: float) -> bool:
    """Report if it came true in time. Asks every tenth of a second."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            print(f"  {what}: not within {seconds:g} s", flush=True)
            return False
        time.sleep(0.1)
    return True


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code < 500
    except httpx.HTTPError:
        return False


@contextmanager
def server(command: Sequence[str | Path], url: str, log: Path) -> Iterator[None]:
    """A server process, from its first answer on.

    Raises:
        RuntimeError: it gave none within a minute.
    """
    words = [str(word) for word in command]
    with Supervisor() as supervisor:
        supervisor.start(str(command[0]), words, log, directory=ROOT, grace=8.0)
        if not wait_for(url, lambda: answers(url), 60):
            raise RuntimeError(
                f"{command[0]} did not start: {log.read_text(errors='replace')[-1000:]}"
            )
        yield


def model(port: int, tokenizer: Path) -> list[str]:
    """The stand-in's command."""
    return inference_standin.command(port, tokenizer, context=60_000)


class Started:
    """An environment file that a launcher runs."""

    def __init__(self, pid: int):
        self.pid = pid
        self.status: int | None = None
        self.ended = threading.Event()

    def stop(self, patience: float = 8.0) -> None:
        """SIGTERM to its group, then SIGKILL."""
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            self.ended.wait(seconds)


class Launcher:
    """A process of one side that has imported the SDK and forks for every file; see
    hook/launcher.py.
    """

    def __init__(self, side: Side, home: Path):
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "hook"), str(side.path)]),
            "HF_HOME": str(home / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "200",
        }
        home.mkdir(parents=True, exist_ok=True)
        self.log = (home / "launcher.log").open("wb")
        command = [python(), HERE / "hook" / "launcher.py"]
        self.process = subprocess.Popen(
            command,
            cwd=home,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.starting = threading.Lock()
        self.running: dict[int, Started] = {}
        self.told: queue.Queue[dict[str, int]] = queue.Queue()
        self.reader = threading.Thread(target=self._read, name=f"launcher-{side.name}", daemon=True)
        self.reader.start()
        self.told.get(timeout=120)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if "ended" not in said:
                self.told.put(said)
            else:
                started = self.running.setdefault(said["ended"], Started(said["ended"]))
                started.status = said["status"]
                started.ended.set()

    def run(
        self,
        argv: Sequence[str | Path],
        cwd: Path,
        log: Path,
        environ: Mapping[str, str],
        more: Mapping[str, Any],
    ) -> Started:
        """Start a file. `more`: the other fields of an order."""
        assert self.process.stdin is not None
        order = {
            "argv": [str(part) for part in argv],
            "cwd": str(cwd),
            "log": str(log),
            "environ": dict(environ),
            **more,
        }
        with self.starting:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            pid = self.told.get(timeout=60)["started"]
            return self.running.setdefault(pid, Started(pid))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)
        self.reader.join(120)
        self.log.close()
