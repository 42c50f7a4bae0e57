"""The installed commands: their names, a new environment, and the page of finished runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.cli import view_run
from atroposlib.cli.lockstep import imported_as, main, new_environment
from atroposlib.errors import UsageError
from tests.atroposlib.service.conftest import free_port, group
from tests.conftest import Processes

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = COMMANDS[name].partition(":")
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_what_is_written_passes_its_test_and_the_rules_of_this_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One kind where a user has nothing, the other in a checkout."""
    monkeypatch.chdir(tmp_path)
    main(["new-env", "find_coin", "--multi-turn"])
    assert capsys.readouterr().out.splitlines()[:2] == [
        "find_coin_server.py",
        "test_find_coin_server.py",
    ]
    for folder in ("environments", "tests/environments"):
        Path(folder).mkdir(parents=True)
    Path("environments", "__init__.py").touch()
    main(["new-env", "divisor2"])
    written = ["environments/divisor2_server.py", "tests/environments/test_divisor2_server.py"]
    assert capsys.readouterr().out.splitlines()[:2] == written

    def run(*command: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        str(tmp_path),
    )
    config = ("--no-cache", "--config", str(ROOT / "pyproject.toml"))
    ours = 'lint.isort.known-first-party = ["atroposlib", "environments"]'
    run(sys.executable, "-m", "ruff", "check", *config, "--config", ours, *written)
    run(sys.executable, "-m", "ruff", "format", "--check", *config, str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Word",
        "1word",
        "a-b",
        "a__b",
        "a_",
        "../x",
        "a.b",
        "x" * 61,
        "words\n",
        "word_server",
        "base",
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="such as"):
        new_environment(name, False, tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["word_server.py", "test_word_server.py"])
def test_a_file_that_is_there_stays_as_it_is(
    there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["new-env", "word", "--folder", str(tmp_path)])
    assert ended.value.code == 2
    assert f"{there} exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no folder .*nowhere.*--tests"):
        new_environment("word", False, tmp_path, tmp_path / "nowhere")
    assert imported_as(ROOT / "environments" / "word_server.py") == "environments.word_server"


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_and_groups_are_shown_from_their_files(tmp_path: Path, processes: Processes) -> None:
    write(
        tmp_path / "run" / "trainer" / "metrics.jsonl",
        {"step": 1, "reward_mean": 0.5},
        {"step": 2, "reward_mean": 0.75},
    )
    write(tmp_path / "run" / "environment" / "rollouts.jsonl", group(2))
    observed = tmp_path / "run" / "observed"
    write(observed / "run.json", {"model": "m", "num_steps": 2, "began": 1.0, "ended": 2.0})
    write(
        observed / "events.jsonl",
        {"kind": "server_lost", "text": "it was gone", "time": 1.5, "severity": "error"},
    )
    write(
        observed / "servers.jsonl",
        {"url": "http://a:1", "version": 2, "epoch": 1, "checksum": "c", "seconds": {}, "gap": 0.5},
    )
    (observed / "stack.json").write_text(json.dumps({"time": 9.0, "live": True, "faults": []}))
    alone = write(tmp_path / "alone.jsonl", {"messages": ["plain", "other"], "scores": [1, 0]})
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "atroposlib.cli.view_run",
        str(tmp_path / "run"),
        str(alone),
        "--port",
        str(port),
    ]
    processes.start("view-run", command, may_finish=True)
    processes.wait_for_http(f"http://127.0.0.1:{port}/ui", seconds=180)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as page:
        assert page.get("/").headers["location"] == "/ui"
        assert page.get("/ui", headers={"host": "evil.example"}).status_code == 403
        runs = {one["name"]: one for one in page.get("/ui/api/runs").json()["runs"]}
        assert set(runs) == {"run", "alone"}
        assert (runs["run"]["state"], runs["run"]["model"], runs["run"]["live"]) == (
            "ended",
            "m",
            False,
        )
        run = {"run": runs["run"]["id"]}
        series = page.get("/ui/api/series", params=run | {"names": "reward_mean"}).json()
        assert series["series"]["reward_mean"]["mean"] == [0.5, 0.75]
        assert [
            event["text"] for event in page.get("/ui/api/events", params=run).json()["events"]
        ] == ["it was gone"]
        assert page.get("/ui/api/weights", params=run).json()["servers"][0]["longest_gap"] == 0.5
        assert page.get("/ui/api/stack", params=run).json() == {
            "time": 9.0,
            "live": False,
            "faults": [],
            "signs": {},
        }
        assert (
            page.get("/ui/api/series", params={"run": runs["alone"]["id"], "names": "a"}).json()[
                "rows"
            ]
            == 0
        )


def test_what_holds_nothing_to_see_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = write(tmp_path / "other" / "numbers.jsonl", {"step": 1})
    nobody = f"http://127.0.0.1:{free_port()}"
    for arguments, words in (
        ([str(nothing)], "holds no run and no groups"),
        ([str(nothing.parent)], "holds no run and no groups"),
        ([str(tmp_path / "nowhere")], "not there"),
        (["--api-url", nobody], "no rollout service answers"),
    ):
        with pytest.raises(SystemExit) as ended:
            view_run.main(arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_the_public_commands_flags_are_taken() -> None:
    given = view_run.parse_arguments(["--port", "7", "--group-size", "4", "--max-token-len", "512"])
    assert (given.port, given.paths, given.api_url) == (7, [], "http://localhost:8000")
