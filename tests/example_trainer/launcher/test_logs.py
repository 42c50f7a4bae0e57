"""Following several logs at once."""

from __future__ import annotations

from pathlib import Path

from example_trainer.launcher.logs import Follower, show
from example_trainer.launcher.records import PARTS


def test_a_follower_reads_whole_lines_as_they_come(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\n")
    follower = Follower(log)
    assert follower.read() == []
    with log.open("a") as file:
        file.write("one\ntw")
    assert follower.read() == ["one"]
    with log.open("a") as file:
        file.write("o\n")
    assert follower.read() == ["two"]


def test_a_follower_survives_a_new_file_and_an_emptied_one(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    follower = Follower(log)
    assert follower.read() == []
    log.write_text("first\n")
    assert follower.read() == ["first"]
    log.rename(tmp_path / "a.previous.log")
    log.write_text("of the next start, which wrote more\n")
    assert follower.read() == ["of the next start, which wrote more"]
    with log.open("w") as file:
        file.write("short\n")
    assert follower.read() == ["short"]


def test_each_line_stands_behind_its_part(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    for name in ("api.log", "vllm.log", "gsm8k.log", "trainer.log", "trainer/vllm.log"):
        (tmp_path / name).write_text(f"old\nlast of {name}\n")
    said: list[str] = []
    rounds = iter([False, False, True])

    def done() -> bool:
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("new\n")
        return next(rounds)

    show(tmp_path, PARTS, lines=1, follow=True, say=said.append, done=done)
    assert sorted(said[:5]) == [
        "environment | last of gsm8k.log",
        "service     | last of api.log",
        "trainer     | last of trainer.log",
        "vllm        | last of trainer/vllm.log",
        "vllm        | last of vllm.log",
    ]
    assert said[5:] == ["trainer     | new"] * 2
    said.clear()
    show(tmp_path, ["service"], lines=2, follow=False, say=said.append)
    assert said == ["service     | old", "service     | last of api.log"]
