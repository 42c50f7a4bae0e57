"""Training with two vLLM servers that are restarted one by one, with the commands that a user types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.typed_commands import Operations, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture
def commands(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Operations]:
    ports = {name: free_port() for name in ("SERVICE", "MASTER")}
    made = Operations(tmp_path, {**ports, "VLLM": f"{free_port()},{free_port()}"})
    yield made
    made.type("stop")


def test_no_step_is_lost_while_every_server_is_restarted(commands: Operations) -> None:
    started = commands.type(
        "start", "--cpu", "--bridge", "broadcast", "--vllm-servers", "2", "--steps", "1000", "--batch-size", "16"
    )
    assert started.returncode == 0, started.stderr
    log = commands.run_folder / "trainer.log"

    def steps() -> list[int]:
        rows = (commands.run_folder / "trainer" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["step"] for row in rows]

    def shown() -> str:
        return commands.type("status").stdout + log.read_text()[-3000:]

    eventually(lambda: (commands.status()["step"] or 0) >= 1, shown, seconds=120)
    before = {row["part"]: row["pid"] for row in commands.status()["rows"]}
    at = steps()[-1]
    rolled = commands.type("restart", "--wait", "300")
    assert rolled.returncode == 0, rolled.stdout + rolled.stderr + shown()
    assert "(2 of 2)" in rolled.stdout
    assert steps()[-1] > at + 2, "training waited" + shown()
    meanwhile = steps()[-1]
    eventually(lambda: steps()[-1] > meanwhile, shown, seconds=60)

    status = commands.status()
    assert status["good"], shown()
    after = {row["part"]: row["pid"] for row in status["rows"]}
    assert {part for part in before if before[part] != after[part]} == {"vllm", "vllm-2"}
    done = steps()
    assert done == list(range(1, len(done) + 1)), "each step is there, once"
    for name in ("vllm.log", "vllm-2.log"):
        assert "waiting for its weights" in (commands.run_folder / name).read_text(errors="replace"), "not the checkpoint's"
    first, second = status["fleet"]["rows"]
    assert (first["standing"], second["standing"]) == ("good", "good")
    assert first["weight_epoch"] == second["weight_epoch"] > 0
    assert log.read_text().count("[Fleet] http://localhost:") >= 4, "each went away and came back"
    assert "ERROR" not in log.read_text()
