"""A rank is killed while all write a checkpoint in the background: the one before is whole, and the
next start takes it.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from example_trainer.training.runs import choose_start, steps_in
from tests.example_trainer.parallel import killed_saving_ranks
from tests.example_trainer.training.tiny_training import make_start
from tests.forked_commands import run_command

pytestmark = pytest.mark.nightly

STEPS = 3
STATE = "trainer_state/optimizer.safetensors"


def test_whichever_rank_is_killed_the_newest_checkpoint_is_one_that_all_had_written(
    tmp_path: Path,
) -> None:
    start = make_start(tmp_path / "start")

    def run(*points: str) -> list[tuple[str, list[int]]]:
        command = [
            sys.executable,
            "-m",
            killed_saving_ranks.__name__,
            str(start),
            str(tmp_path),
            str(STEPS),
            *points,
        ]
        done = run_command(command, seconds=240)
        assert done.returncode == 0, done.stdout[-3000:]
        found: list[tuple[str, list[int]]] = json.loads(done.stdout.splitlines()[-1])
        return found

    ((counted, statuses),) = run("0:0")
    assert statuses == [0, 0]
    pieces = int(counted)
    assert pieces > 3 * STEPS
    whole = steps_in(tmp_path / "0:0")
    assert list(whole) == [1, 2, 3]

    points = ["1:1", f"1:{pieces // 2}", f"1:{pieces}", f"0:{pieces // 2}"]
    reached = set()
    for point, (_, statuses) in zip(points, run(*points), strict=True):
        killed = int(point.partition(":")[0])
        assert statuses[killed] == -signal.SIGKILL, point
        assert statuses[1 - killed] == 1, "the other one notices, and ends"
        folder = tmp_path / point
        saved = steps_in(folder) if folder.exists() else {}
        for step, path in saved.items():
            for file in ("model.safetensors", STATE):
                assert (path / file).read_bytes() == (whole[step] / file).read_bytes(), (
                    point,
                    step,
                    file,
                )
        chosen = choose_start("auto", folder, "model", 2000)
        assert (chosen.saved.step if chosen.saved else 0) == max(saved, default=0)
        reached.add(max(saved, default=0))
    assert reached == {0, 1, 2}
