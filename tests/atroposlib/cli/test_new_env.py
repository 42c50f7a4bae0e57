"""A new environment: what is written works as it is, and nothing that is there is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.cli.lockstep import imported_as, main, new_environment
from atroposlib.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]


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
