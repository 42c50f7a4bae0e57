"""Several vLLM servers: their names, ports, folders and GPUs, and the options of trainer and
environments about them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.child_processes.vllm_flags import Degrees
from example_trainer.command_line import parse_config
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.options import choose_gpus, degrees, parse, save, server_ports
from example_trainer.launcher.records import (
    PARTS,
    Records,
    chosen,
    in_order,
    kind_of,
    parts_of,
    server_name,
    server_number,
    to_stop,
)
from example_trainer.launcher.stack import Stack

several = st.integers(1, 40)


@given(several)
def test_names_and_numbers_of_servers_are_each_others_inverse(servers: int) -> None:
    parts = parts_of(servers)
    assert len(set(parts)) == len(parts) == servers + 3
    assert [server_number(part) for part in parts if kind_of(part) == "vllm"] == list(
        range(servers)
    )
    assert all(server_name(number) in parts for number in range(servers))
    assert parts_of(1) == PARTS


@given(st.text(max_size=8) | st.from_regex(r"vllm-?\d*", fullmatch=True))
def test_a_name_is_a_parts_or_nobodys(name: str) -> None:
    number = server_number(name)
    assert (number is not None) == (kind_of(name) == "vllm")
    assert kind_of(name) in ("", *PARTS)
    if number is not None:
        assert server_name(number) == name


@given(several, st.randoms())
def test_parts_start_and_stop_in_their_order_however_they_are_named(
    servers: int, random: object
) -> None:
    parts = list(parts_of(servers))
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert in_order(parts) == chosen(parts, parts) == parts_of(servers)
    stopped = to_stop(parts)
    assert (stopped[:2], stopped[-1]) == (("environment", "trainer"), "service")
    assert stopped[2:-1] == chosen(["servers"], parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm-4", "'vllm-4' is not there: this stack has vllm, vllm-2"),
        ("vllm-1", "is not a part of the stack"),
    ],
)
def test_a_server_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        chosen([name], parts_of(2))


gpu_counts = st.integers(0, 72)
sizes = st.none() | st.builds(
    Degrees, st.none() | st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2])
)


@given(gpu_counts, st.integers(2, 9), sizes, st.booleans(), st.data())
def test_servers_get_equally_many_gpus_each_of_their_own(
    count: int, servers: int, size: Degrees | None, trains: bool, data: st.DataObject
) -> None:
    visible = tuple(range(count))
    asked = (
        st.none() | st.lists(st.sampled_from(visible), min_size=1, unique=True).map(tuple)
        if visible
        else st.none()
    )
    vllm, trainer = data.draw(asked), data.draw(asked)
    try:
        got, learns = choose_gpus(vllm, trainer, visible, False, servers, size, trains)
    except LauncherError:
        return  # that none is raised without need is the next test's
    if not visible:
        assert (got, learns) == ((), ())
        return
    assert got
    assert len(got) % servers == 0
    assert len(set(got)) == len(got)
    assert set(got) <= set(visible)
    assert vllm in (None, got)
    assert trainer in (None, learns)
    if trains:
        assert learns
        assert not set(learns) & set(got)
    if size is not None and size.gpus is not None:
        assert len(got) == servers * size.gpus


@given(st.integers(2, 9), st.sampled_from([1, 2, 4]))
def test_a_machine_that_has_enough_gpus_is_never_refused(servers: int, each: int) -> None:
    visible = tuple(range(servers * each + 1))
    assert choose_gpus(None, None, visible, False, servers, Degrees(each)) == (
        visible[:-1],
        visible[-1:],
    )
    assert (
        choose_gpus(None, None, visible[:-1], False, servers, Degrees(each), trains=False)[0]
        == visible[:-1]
    )
    with pytest.raises(LauncherError, match=rf"--vllm-servers {servers} of {each} GPUs need"):
        choose_gpus(None, None, visible[:-1], False, servers, Degrees(each))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--vllm-gpus 0,1,2", "3 GPUs cannot be dealt out evenly to 2 servers"),
        (
            "--vllm-gpus 0,1,2,3 --vllm-args=-tp=4",
            "4 GPUs, and 2 servers of tensor-parallel size 4 need 8",
        ),
        (
            "--vllm-args=--tensor_parallel_size=4",
            "--vllm-servers 2 of 4 GPUs need 8 beside the trainer's, and 5 of 0,1,2,3,4,5",
        ),
        ("--vllm-gpus 0,1 --trainer-gpus 1", "GPU 1 is both a server's and the trainer's"),
        ("--vllm-gpus 0,1,2,3,4,5", "no GPU is left for the trainer"),
        ("--vllm-gpus 0,0", "names a GPU twice"),
        ("--vllm-args=-tp=two", "-tp is 'two'"),
        ("--bridge single-copy", "--vllm-servers 2 excludes --bridge single-copy"),
        ("--vllm-port 9001,9002,9003", "names 3 ports for 2 servers"),
        ("--vllm-port 9001,9001", "names a port twice"),
        ("--vllm-port 65535", "the last one is 65535"),
        ("vllm-3", "'vllm-3' is not there: this stack has vllm, vllm-2"),
    ],
)
def test_a_fleet_that_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setattr("example_trainer.launcher.options.visible_gpus", lambda: tuple(range(6)))
    with pytest.raises(LauncherError) as caught:
        parse(["--model", "owner/name", "--vllm-servers", "2", *arguments.split()])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 65535), several)
def test_ports_follow_the_first_one(first: int, servers: int) -> None:
    if first + servers > 65536:
        with pytest.raises(LauncherError):
            server_ports((first,), servers)
    else:
        assert server_ports((first,), servers) == tuple(range(first, first + servers))


def test_the_last_degree_counts() -> None:
    assert degrees(
        ("--max-num-seqs", "4", "-tp", "2", "--tensor-parallel-size=4", "-dp=2")
    ) == Degrees(4, 2)
    assert degrees(()) == Degrees()


def test_every_server_is_told_of_and_has_its_own_of_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("example_trainer.launcher.options.visible_gpus", lambda: tuple(range(8)))
    options = parse(
        f"--model owner/name --vllm-servers 3 --vllm-gpus 0,1,2,3,4,5 --vllm-port 9001,9005,9009 --run {tmp_path}".split()
    )
    stack = Stack(options)
    assert options.parts == ("service", "vllm", "vllm-2", "vllm-3", "environment", "trainer")
    commands = [stack.command(part) for part in ("vllm", "vllm-2", "vllm-3")]
    assert [command.variables["CUDA_VISIBLE_DEVICES"] for command in commands] == [
        "0,1",
        "2,3",
        "4,5",
    ]
    assert [command.variables["LOGDIR"] for command in commands] == [
        str(tmp_path), str(tmp_path / "vllm-2"), str(tmp_path / "vllm-3")
    ]  # fmt: skip
    assert [stack.log(part).name for part in ("vllm", "vllm-2", "vllm-3")] == [
        "vllm.log",
        "vllm-2.log",
        "vllm-3.log",
    ]
    assert [stack.port(part) for part in ("vllm", "vllm-2", "vllm-3")] == [9001, 9005, 9009]
    assert all("--tensor-parallel-size 2" in " ".join(command.arguments) for command in commands)
    assert stack.ports()[9005] == "--vllm-port of vllm-2"
    trainer = stack.command("trainer")
    config = parse_config(
        trainer.arguments[trainer.arguments.index("example_trainer/grpo.py") + 1 :]
    )
    assert config.vllm_addresses == [("localhost", 9001), ("localhost", 9005), ("localhost", 9009)]
    assert trainer.variables["CUDA_VISIBLE_DEVICES"] == "6"
    environment = stack.command("environment").arguments
    urls = "http://localhost:9001,http://localhost:9005,http://localhost:9009"
    assert environment[environment.index("--openai.base_url") + 1] == urls
    assert "--follow_fleet" in environment


def test_a_port_that_two_parts_want_is_refused() -> None:
    with pytest.raises(
        LauncherError, match="port 9002 is both --vllm-port of vllm-2 and --metrics-port"
    ):
        Stack(parse(["--cpu", "--vllm-servers", "2", "--metrics-port", "9002"])).ports()


def test_resume_takes_single_servers(tmp_path: Path) -> None:
    run = ["--run", str(tmp_path)]
    save(parse([*run, "--cpu", "--vllm-servers", "3"]))
    assert parse([*run, "--resume", "vllm-2"]).parts == ("vllm-2",)
    assert parse([*run, "--resume", "servers"]).parts == ("vllm", "vllm-2", "vllm-3")
    with pytest.raises(LauncherError, match="'vllm-4' is not there"):
        parse([*run, "--resume", "vllm-4"])
    assert Records(tmp_path).parts() == ()


def test_a_fleet_grows_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_trainer.launcher.options.visible_gpus", lambda: tuple(range(6)))
    run = ["--run", str(tmp_path)]
    save(
        parse(
            [
                *run,
                "--model",
                "owner/name",
                "--vllm-servers",
                "2",
                "--vllm-gpus",
                "0,1",
                "--trainer-gpus",
                "2",
            ]
        )
    )
    more = parse([*run, "--resume", "vllm-3", "vllm-4", "--vllm-servers", "4"])
    assert (more.parts, more.joining) == (("vllm-3", "vllm-4"),) * 2
    assert [Stack(more).command(part).variables["CUDA_VISIBLE_DEVICES"] for part in more.parts] == [
        "3",
        "4",
    ]
    assert more.vllm_ports == (9001, 9002, 9003, 9004)
    save(more)
    again = parse([*run, "--resume"])
    assert (again.parts, again.joining) == (parts_of(4), ())
    for servers, message in (
        ("4", "this run has 4"),
        ("6", "2 more GPUs are needed, 1 for each server, and 1 are free"),
    ):
        with pytest.raises(LauncherError, match=message):
            parse([*run, "--resume", "--vllm-servers", servers])
    save(parse([*run, "--cpu"]))
    with pytest.raises(LauncherError, match="was started for one server alone"):
        parse([*run, "--resume", "--vllm-servers", "2"])
