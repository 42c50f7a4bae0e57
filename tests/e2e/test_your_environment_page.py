"""docs/your-environment.md, typed from its own text: files are written, commands run, and the
starter model is trained.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from example_trainer.launcher.records import read_keys
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import FORKED_ENGINES
from tests.e2e.typed_commands import Operations, eventually
from tests.forked_commands import run_command
from tests.typed_page import blocks, command_lines, words_of, write_files

pytestmark = pytest.mark.nightly

PAGE = ROOT / "docs" / "your-environment.md"
STEPS = 2
PLANNED = (
    "--model Qwen/",
    "start.sh --environment short_coins_server.py",
    "start.sh --environment environments/math_server.py",
)
"""In commands that test_guide_commands.py plans: of three trainings that differ in the environment
alone, one is run."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert write_files(PAGE, tmp_path) == {
        "coins_server.py",
        "short_coins_server.py",
        "questions.csv",
    }
    return tmp_path


class Reader:
    """A reader who types the page's commands one after the other, on free ports and with few steps."""

    def __init__(self, folder: Path, processes: Processes, free_port: Callable[[], int]) -> None:
        self.folder, self.processes, self.page_port = folder, processes, free_port()
        self.operations = Operations(
            folder, {name: free_port() for name in ("SERVICE", "VLLM", "MASTER", "METRICS")}
        )
        self.run_folder = self.operations.run_folder = (
            folder / "runs" / "stack"
        )  # as the page has it
        self.operations.environment |= FORKED_ENGINES | {"LOCKSTEP_RUN": str(self.run_folder)}
        self.keys: dict[str, str] = {}

    def type(self, line: str) -> str:
        """Type a command, and return its output."""
        if line == "set -a; . runs/stack/keys.env; set +a":
            self.keys = read_keys(self.run_folder)
            return ""
        if line.startswith("./scripts/"):
            return self.script(*line.split(".sh", 1))
        if line.startswith("view-run "):
            return self.page(line)
        words = [
            *words_of(line),
            "--openai.base_url",
            f"http://127.0.0.1:{self.operations.ports['VLLM']}/v1",
        ]
        result = run_command(words, {**os.environ, **self.keys}, self.folder)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def script(self, path: str, arguments: str) -> str:
        """Type a script.

        If it starts a trainer, wait for the end of the run, as the page's reader does.
        """
        arguments = re.sub(
            r"--steps \d+", f"--steps {STEPS}", arguments.replace("$PWD", str(self.folder))
        )
        _, *words = words_of(f"python {arguments}")
        script = Path(path).name
        done = self.operations.type(script, *(["--no-follow"] if script == "logs" else []), *words)
        assert done.returncode == 0, done.stdout + done.stderr
        if script == "start" and "trainer" in words:
            log = self.run_folder / "trainer.log"
            eventually(
                lambda: f"Step {STEPS}/{STEPS}  reward " in log.read_text(),
                log.read_text,
                seconds=180,
            )
            eventually(
                lambda: self.states("trainer", "environment") == {"finished"},
                log.read_text,
                seconds=60,
            )
        return done.stdout

    def states(self, *parts: str) -> set[str]:
        return {row["state"] for row in self.operations.status()["rows"] if row["part"] in parts}

    def page(self, line: str) -> str:
        """Serve the page of rollouts as the command does, and return the runs that it lists."""
        _, *words = words_of(line.replace("view-run", "python", 1))
        words[words.index("--port") + 1] = str(self.page_port)
        command = [sys.executable, "-m", "atroposlib.cli.view_run", *words]
        self.processes.start("page", command, directory=self.folder)
        url = f"http://127.0.0.1:{self.page_port}/ui"
        self.processes.wait_for_http(url, 120)
        return httpx.get(f"{url}/api/runs", timeout=60, trust_env=False).text


@pytest.fixture
def reader(folder: Path, processes: Processes, free_port: Callable[[], int]) -> Iterator[Reader]:
    made = Reader(folder, processes, free_port)
    yield made
    made.operations.type("stop")


@pytest.mark.e2e
@pytest.mark.timeout(540)
def test_the_page_is_typed_from_its_first_to_its_last_command(reader: Reader) -> None:
    commands = command_lines(PAGE)
    typed = [line for line in commands if not any(part in line for part in PLANNED)]
    assert len(typed) == len(commands) - len(PLANNED)
    outputs = {line: reader.type(line) for line in typed}
    shown = [block.text for block in blocks(PAGE) if block.text.startswith("evaluation of coins: ")]
    measured = [
        re.findall(r"evaluation of coins: .*", text)[-1]
        for line, text in outputs.items()
        if " evaluate " in line
    ]
    assert measured[0].partition(",")[0] == shown[0].partition(",")[0], (
        "the page's figure is the starter model's"
    )
    assert measured[1].endswith(f"weight version {STEPS}")
    for name, groups in {"coins": 4, "short_coins": 2, "math": 2}.items():
        rows = [
            json.loads(line)
            for line in (reader.folder / "data" / f"{name}.jsonl").read_text().splitlines()
        ]
        assert len(rows) == groups
        assert all(
            max(row["scores"]) <= 1 and len(row["tokens"]) == len(row["scores"]) for row in rows
        )
    page = next(text for line, text in outputs.items() if line.startswith("view-run "))
    assert [run["name"] for run in json.loads(page)["runs"]] == ["coins"]


def test_the_environment_has_at_most_40_lines(folder: Path) -> None:
    """The heading of docs/environments.md that leads here promises it."""
    assert len((folder / "coins_server.py").read_text().splitlines()) <= 40


def imported(file: Path) -> ModuleType:
    """Import a file of the page."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_reward_prefers_short_right_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "coins_server", imported(folder / "coins_server.py"))
    module = imported(folder / "short_coins_server.py")
    environment = object.__new__(module.ShortCoins)

    async def score(text: str, tokens: int) -> tuple[float, bool]:
        graded = await environment.grade((47, 25), module.Response(text, tokens, finished=True))
        return graded.score, graded.correct

    assert await score("\\boxed{72}", 5) == (pytest.approx(0.95), True)
    assert await score("\\boxed{72}", 20) == (pytest.approx(0.8), True)
    assert await score("\\boxed{73}", 5) == (pytest.approx(-1.05), False)
