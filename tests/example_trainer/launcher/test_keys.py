"""A run's keys: made once, read by their owner alone, handed over as variables, and nowhere else."""

from __future__ import annotations

import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.child_processes.processes import ProcessError
from example_trainer.launcher.options import parse
from example_trainer.launcher.records import (
    KEYS_FILE,
    NEEDED_BY,
    PARTS,
    SERVICE,
    VLLM,
    make_keys,
    read_keys,
    refuse_keys,
    variables_of,
)
from example_trainer.launcher.stack import Stack
from example_trainer.launcher.status import PartStatus, Status, queue_of, table
from tests.http_server import HttpServer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_gets_keys_of_its_own_and_keeps_them(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, {}, running=False)
    assert keys.keys() == {SERVICE, VLLM}
    assert all(len(key) >= 32 for key in keys.values())
    assert len(set(keys.values())) == 2
    assert mode(tmp_path / KEYS_FILE) == 0o600
    assert make_keys(tmp_path, {}, running=True) == keys == read_keys(tmp_path)
    (tmp_path / "other").mkdir()
    assert make_keys(tmp_path / "other", {}, running=False) != keys


def test_the_file_is_closed_again_if_somebody_opened_it(tmp_path: Path) -> None:
    make_keys(tmp_path, {}, running=False)
    (tmp_path / KEYS_FILE).chmod(0o644)
    make_keys(tmp_path, {}, running=False)
    assert mode(tmp_path / KEYS_FILE) == 0o600


def test_keys_of_the_shell_win_but_not_over_parts_that_live(tmp_path: Path) -> None:
    make_keys(tmp_path, {VLLM: "first"}, running=False)
    assert make_keys(tmp_path, {VLLM: "second"}, running=False)[VLLM] == "second"
    with pytest.raises(
        ProcessError, match=r"VLLM_API_KEY in this shell is another key than the parts .*: `unset"
    ) as caught:
        make_keys(tmp_path, {VLLM: "third"}, running=True)
    assert "third" not in str(caught.value)
    assert read_keys(tmp_path)[VLLM] == "second"


def test_new_keys_are_not_made_beside_parts_that_live(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, {}, running=False)
    (tmp_path / KEYS_FILE).unlink()
    with pytest.raises(
        ProcessError, match=rf"{KEYS_FILE} has no {VLLM}.* put .* back.* or stop them first"
    ):
        make_keys(tmp_path, {SERVICE: keys[SERVICE]}, running=True)
    assert not (tmp_path / KEYS_FILE).exists()
    assert make_keys(tmp_path, keys, running=True) == keys


@pytest.mark.parametrize(("answer", "told"), [(401, "401 Unauthorized"), (500, ""), (200, "")])
def test_a_service_that_refuses_the_key_is_not_well(answer: int, told: str) -> None:
    with HttpServer(lambda request: (answer, {"queue": {"groups": 5}})) as server:
        queue, refusing, shut_out = queue_of(server.url, "other")
    assert (queue, refusing, shut_out) == (5 if answer == 200 else None, "", told)
    row = PartStatus("service", "up", "healthy", True, 1, 0.0, 1, "log", "")
    status = Status(rows=[row], shut_out=shut_out)
    assert status.good == (not told)
    told_how = f"refuses the key {SERVICE} of /run/{KEYS_FILE} (401 Unauthorized): put back"
    assert (told_how in table(status, Path("/run"), 1.0)) == bool(told)


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\r"), min_size=1))
def test_a_shell_reads_the_file_as_we_do(
    tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    run = tmp_path_factory.mktemp("run")
    make_keys(run, {VLLM: key}, running=False)
    assert read_keys(run)[VLLM] == key
    command = f'. {shlex.quote(str(run / KEYS_FILE))}; printf %s "$VLLM_API_KEY"'
    assert (
        subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=120).stdout
        == key.encode()
    )


def test_a_file_that_was_spoilt_is_told(tmp_path: Path) -> None:
    (tmp_path / KEYS_FILE).write_text("export VLLM_API_KEY='half")
    with pytest.raises(ProcessError, match=rf"{KEYS_FILE} cannot be read \(No closing quotation\)"):
        make_keys(tmp_path, {}, running=False)


def test_each_part_gets_the_keys_that_it_needs() -> None:
    keys = {SERVICE: "s", VLLM: "v"}
    shell = {"PATH": "/bin", SERVICE: "old", VLLM: "old"}
    assert NEEDED_BY.keys() == set(PARTS)
    assert variables_of("service", shell, keys) == {"PATH": "/bin", SERVICE: "s", VLLM: "v"}
    assert variables_of("vllm", shell, keys) == {"PATH": "/bin", VLLM: "v"}
    assert (
        variables_of("trainer", shell, keys)
        == variables_of("environment", shell, keys)
        == {"PATH": "/bin", **keys}
    )


@pytest.mark.parametrize(
    "words",
    [
        "--api-key k",
        "--vllm-api-key=k",
        "--openai.api_key k",
        "--env.rollout_server_api_key=k",
        "--api-key-file /k",
    ],
)
@pytest.mark.parametrize("part", PARTS)
def test_keys_among_the_flags_are_refused(part: str, words: str) -> None:
    with pytest.raises(
        ProcessError,
        match=rf"--{part}-args holds {words.split('=')[0].split()[0]}, which all users",
    ):
        parse(["--cpu", f"--{part}-args={words}"])
    refuse_keys(part, ("--max-num-seqs", "4"))


def test_commands_are_typed_with_the_file_and_without_the_keys(tmp_path: Path) -> None:
    stack = Stack(parse(["--cpu", "--run", str(tmp_path)]))
    keys = make_keys(tmp_path, {}, running=False)
    script = stack.script()
    assert f". {tmp_path / KEYS_FILE}" in script
    assert not any(key in script for key in keys.values())


@pytest.mark.parametrize(("flags", "host"), [([], "127.0.0.1"), (["--all-interfaces"], "0.0.0.0")])
def test_every_part_listens_on_this_machine_unless_all_interfaces_are_asked_for(
    flags: list[str], host: str
) -> None:
    stack = Stack(parse(["--cpu", "--metrics-port", "9101", *flags]))
    for part, flag in (("service", "--host"), ("vllm", "--host"), ("trainer", "--metrics-host")):
        arguments = stack.command(part).arguments
        assert arguments[arguments.index(flag) + 1] == host
    owning = Stack(parse(["--cpu", "--bridge", "restart", *flags])).command("trainer").arguments
    assert any(f"--host {host}" in word for word in owning)
