"""The commands of a run's processes, written once for every launcher."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.cli import run_api
from example_trainer import reference_worker
from example_trainer.async_grpo.actor import PYTHON
from example_trainer.command_line import parse_config, parse_section
from example_trainer.launcher import roles
from example_trainer.parameter_server.options import ParameterServerOptions

SERVERS = ["http://localhost:1", "http://localhost:2"]


@given(
    st.text(min_size=1),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.text(min_size=1)),
    st.none() | st.just("x y"),
)
def test_a_program_reads_the_values_that_were_written_as_flags(
    text: str, number: int, real: float, bare: bool, several: list[str], optional: str | None
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--a-text")
    parser.add_argument("--number", type=int)
    parser.add_argument("--real", type=float)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--several", action="append", default=[])
    parser.add_argument("--optional")
    read = parser.parse_args(
        roles.flags(
            a_text=text, number=number, real=real, bare=bare, several=several, optional=optional
        )
    )
    assert (read.a_text, read.number, read.real, read.bare) == (text, number, real, bare)
    assert (read.several, read.optional) == (several, optional)


def test_each_program_takes_its_command(tmp_path: Path) -> None:
    service = roles.service(
        "127.0.0.1", 8000, store=tmp_path / "rollouts.db", vllm_server=SERVERS, max_queue_groups=5
    )
    read = run_api.parse_arguments(service[service.index("atroposlib.cli.run_api") + 1 :])
    assert (read.port, read.vllm_server, read.max_queue_groups) == (8000, SERVERS, 5)
    reference = roles.reference_worker(
        "owner/name", "http://service", name="reference-1", deterministic=True
    )
    config, worker = reference_worker.parse_arguments(
        reference[reference.index("example_trainer.reference_worker") + 1 :]
    )
    assert (config.atropos_url, worker.name, config.deterministic) == (
        "http://service",
        "reference-1",
        True,
    )
    words = roles.parameter_server(
        "owner/name", "http://service", ["a:1", "b:2"], part="2/3", log_dir=tmp_path
    )
    options = parse_section(
        ParameterServerOptions, "parameter_server", words[words.index("-m") + 2 :]
    )
    assert (options.part, list(options.vllm_servers)) == ("2/3", ["a:1", "b:2"])


@pytest.mark.parametrize("bridge", roles.BRIDGE_FLAGS)
def test_the_trainer_takes_the_flags_of_each_bridge(bridge: str) -> None:
    words = roles.trainer(
        "owner/name", bridge, "http://service", {"training_steps": 7, "lr": 1e-5, "vllm_port": 9001}
    )
    config = parse_config(words[words.index("example_trainer/grpo.py") + 1 :])
    assert (config.training_steps, config.lr, config.atropos_url) == (7, 1e-5, "http://service")
    assert config.weight_bridge_mode == roles.BRIDGE_FLAGS[bridge][1]


def test_settings_of_an_environment_are_words_that_it_reads() -> None:
    words = roles.environment(
        "arithmetic",
        "http://service",
        SERVERS,
        settings={"group_size": 8, "seed": None, "exact_resume": True, "x": False},
    )
    assert words[2:4] == ["environments/arithmetic_server.py", "serve"]
    assert words[words.index("--openai.base_url") + 1] == ",".join(SERVERS)
    assert words[-6:] == ["--env.group_size", "8", "--env.exact_resume", "true", "--env.x", "false"]
    assert roles.environment("mine.py", "", [], settings={})[2] == "mine.py"


def test_a_placeholder_can_stand_for_the_interpreter() -> None:
    flags = roles.vllm_flags("0.0.0.0", on_gpu=False)
    assert roles.vllm_server("owner/name", 1, flags)[0] == sys.executable
    assert roles.vllm_server("owner/name", 1, flags, python=PYTHON)[0] == PYTHON
    assert flags == ["--host", "0.0.0.0", "--dtype", "float32", "--enforce-eager"]
    assert roles.vllm_flags("h", on_gpu=True) == ["--host", "h", "--dtype", "bfloat16"]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1)
)
def test_a_command_as_it_is_typed_is_read_as_it_was(words: list[str]) -> None:
    command = roles.Command("part", tuple(words), {"LOGDIR": "/a folder"}, "part.log")
    assert shlex.split(command.typed()) == ["LOGDIR=/a folder", *words]
