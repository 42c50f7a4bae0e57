"""Logins of W&B, found without wandb."""

from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.utils.metrics import is_logged_in, offline_mode

ENTRY = "machine api.wandb.ai\n  login user\n  password {}\n"


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED", "WANDB_IDENTITY_TOKEN_FILE"]
)
def test_variables_decide(name: str, tmp_path: Path) -> None:
    assert is_logged_in({"HOME": str(tmp_path), name: "x"})
    assert not is_logged_in({"HOME": str(tmp_path), name: ""})


@pytest.mark.parametrize("file", [".netrc", "_netrc"])
def test_the_file_that_wandb_login_writes_is_a_login(file: str, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    (tmp_path / file).write_text(ENTRY.format("0123"))
    (tmp_path / file).chmod(0o600)
    assert is_logged_in(home)
    assert not is_logged_in(home | {"WANDB_BASE_URL": "https://wandb.example.org"})
    assert not is_logged_in(home | {"NETRC": str(tmp_path / "another")})
    assert offline_mode(tmp_path, home) == ({}, "")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "machine example.org\n  login a\n  password b\n",
        "machine api.wandb.ai login",
        "\x00\xff",
    ],
)
def test_other_files_are_none(content: str, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(content, encoding="latin-1")
    (tmp_path / ".netrc").chmod(0o600)
    assert not is_logged_in({"HOME": str(tmp_path)})


def test_without_a_login_the_run_is_offline_and_the_line_says_how_to_upload_it(
    tmp_path: Path,
) -> None:
    mode, notice = offline_mode("logs", {"HOME": str(tmp_path)})
    assert mode == {"mode": "offline"}
    assert notice == (
        "W&B has no login (`wandb login` or WANDB_API_KEY): the run is kept offline in logs/wandb; "
        "after a login, upload it with `wandb sync logs/wandb/offline-run-*`"
    )
