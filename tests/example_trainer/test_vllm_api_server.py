"""The server's refusals before it loads anything: one line with the fault and the remedy, and a
status that is not 0.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import save

from example_trainer.vllm_api_server import (
    MULTICAST_OFF,
    _cpu_defaults,
    avoid_multicast,
    check_model,
    keep_experts_plain,
)
from tests.forked_commands import run_command
from tests.geometries import config_of
from vllm_patching.server import flags as server_flags
from vllm_patching.server.flags import parse_arguments

ROOT = Path(__file__).resolve().parents[2]

# One process answers all the command lines, forked from one that has imported vLLM, which takes
# seconds. The first one it runs as `python FILE` does.
RUN_ALL = """
import contextlib, io, json, os, runpy, sys
from pathlib import Path
from unittest import mock
server = sys.argv[2]
answers = {}
sys.path[0], before = str(Path(server).parent), sys.argv
sys.argv = [server, "--model", "/no/such/model"]
said = io.StringIO()
try:
    with contextlib.redirect_stderr(said):
        runpy.run_path(server, run_name="__main__")
except SystemExit as end:
    answers["by path"] = [end.code, said.getvalue()]
sys.argv = before
from example_trainer.vllm_api_server import main
for name, words in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    flags = [word for word in words if not word[0].isupper()]
    variables = dict(word.split("=") for word in words if word[0].isupper())
    with contextlib.redirect_stderr(said), mock.patch.dict(os.environ, variables):
        try:
            main(flags)
            status = 0
        except SystemExit as end:
            status = end.code
    answers[name] = [status, said.getvalue()]
print("ANSWERS", json.dumps(answers))
"""

EXPECTED = {
    "by path": "--model /no/such/model: no such folder",
    "no such folder": "--model /no/such/model: no such folder",
    "no checkpoint": "the folder has no config.json",
    "cut weights": "model.safetensors cannot be read (Error while deserializing header: ",
    "cut header": "): download or copy the file again",
    "unknown id": "--model nobody/nothing: no such folder here, and the Hugging Face Hub",
    "unknown flag": "unknown flag --tensor-parallel-sise; did you mean --tensor-parallel-size?",
    "port in use": "cannot listen on port ",
    "pipeline": "--pipeline-parallel-size 2 cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1: only tensor parallelism",
    "sleep": "sleep mode moves the weights' memory",
    "experts on ranks": "--enable-expert-parallel True cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1: it gives each "
    "rank whole experts, and the bridge sends a part of every expert; leave it out",
    "quantization": "quantised weights differ from the trainer's",
    "deterministic": "--deterministic needs an NVIDIA GPU",
    "lora": "--enable-lora cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1",
    "developers": "VLLM_SERVER_DEV_MODE=1 cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1",
    "developers and adapters": "VLLM_SERVER_DEV_MODE=1 cannot be combined with --enable-lora",
    "deadline": "--bridge-timeout 0 must be larger than 0",
    "adapters of replicas": "--data-parallel-size 2 cannot be combined with --enable-lora: only 1 is supported",
    "replicas elsewhere": "--data-parallel-size-local 1 cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1: all replicas",
    "replicas of other front ends": "--data-parallel-rank 1 cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1: all replicas",
    "front ends": "--api-server-count 2: one process must own the bridge's state and count",
    "experts of tokens": "--enable-return-routed-experts needs a GPU",
    "adapters of tier 2": "is a MixtralForCausalLM, which has no adapters here",
    "adapters of a mixture": "is a mixture (Qwen3MoeForCausalLM). vLLM computes adapters of mixtures with Triton",
}


def command_lines(good: list[str]) -> dict[str, list[str]]:
    """Refused command lines by case, made of a good one; variables come first."""
    replicas = [*good, "--data-parallel-size", "2"]
    apart, developers = "VLLM_ENABLE_SHARED_WEIGHTS=0", "VLLM_SERVER_DEV_MODE=1"
    return {
        "no such folder": ["--model", "/no/such/model"],
        "lora": [*good, "--enable-lora"],
        "unknown id": ["--model", "nobody/nothing"],
        "unknown flag": [*good, "--tensor-parallel-sise", "2"],
        "pipeline": [*good, "--pipeline-parallel-size", "2"],
        "sleep": [*good, "--enable-sleep-mode"],
        "experts on ranks": [*good, "--tensor-parallel-size", "2", "--enable-expert-parallel"],
        "quantization": [*good, "--quantization", "fp8"],
        "deterministic": [*good, "--deterministic"],
        "developers": [developers, *good],
        "developers and adapters": [developers, apart, *good, "--enable-lora"],
        "adapters of replicas": [apart, *replicas, "--enable-lora"],
        "replicas elsewhere": [*replicas, "--data-parallel-size-local", "1"],
        "replicas of other front ends": [*replicas, "--data-parallel-rank", "1"],
        "deadline": [*good, "--bridge-timeout", "0"],
        "front ends": [apart, *good, "--api-server-count", "2"],
        "experts of tokens": [*good, "--enable-return-routed-experts"],
    }


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> dict[str, tuple[int, str]]:
    empty = tmp_path_factory.mktemp("empty")
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    lines = command_lines(["--model", str(model), "--port", str(free_port())])
    lines["no checkpoint"] = ["--model", str(empty)]
    for case, kept in (("cut weights", -1), ("cut header", 20)):
        folder = tmp_path_factory.mktemp("cut")
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        weights = save({"one": torch.zeros(8)})
        (folder / "model.safetensors").write_bytes(weights)
        check_model(str(folder))  # the whole file is accepted
        (folder / "model.safetensors").write_bytes(weights[:kept])
        lines[case] = ["--model", str(folder)]
    mixture = tmp_path_factory.mktemp("mixture")
    (mixture / "config.json").write_text(json.dumps(config_of("Qwen3Moe", 2, 8, 6, 4, 2, 2, 10)))
    tier_2 = tmp_path_factory.mktemp("tier_2")
    (tier_2 / "config.json").write_text('{"architectures": ["MixtralForCausalLM"]}')
    lines["adapters of tier 2"] = [
        "VLLM_ENABLE_SHARED_WEIGHTS=0",
        *("--model", str(tier_2), "--enable-lora", "--port", str(free_port())),
    ]
    lines["adapters of a mixture"] = [
        "VLLM_ENABLE_SHARED_WEIGHTS=0",
        *("--model", str(mixture), "--enable-lora", "--port", str(free_port())),
    ]
    program = ROOT / "example_trainer" / "vllm_api_server.py"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        lines["port in use"] = ["--model", str(model), "--port", str(taken.getsockname()[1])]
        result = run_command(
            [sys.executable, "-c", RUN_ALL, json.dumps(lines), program],
            os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_SHARED_WEIGHTS": "1"},
            Path("/"),
            "vllm",
        )
    assert "ANSWERS" in result.stdout, result.stdout
    parsed: dict[str, tuple[int, str]] = json.loads(result.stdout.split("ANSWERS", 1)[1])
    return parsed


@pytest.mark.parametrize("case", EXPECTED)
def test_each_refusal_is_one_line_and_ends_with_2(
    case: str, answers: dict[str, tuple[int, str]]
) -> None:
    status, said = answers[case]
    errors = [line for line in said.splitlines() if line.startswith("ERROR vllm_api_server: ")]
    assert status == 2
    assert len(errors) == 1, said
    assert EXPECTED[case] in errors[0]
    assert "Traceback" not in said


def test_a_build_of_vllm_that_finds_no_device_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_server_parser(*_: object) -> NoReturn:
        # The error of vLLM's CUDA build without a visible GPU; the build that tests run on has its
        # device.
        raise RuntimeError(
            "Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"
        )

    monkeypatch.setattr(server_flags, "make_server_parser", make_server_parser)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--model", "any"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "CUDA_VISIBLE_DEVICES='7'" in said
    assert "scripts/setup.sh --cpu" in said


FUSED = ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": true}}']


@pytest.mark.parametrize("variable", MULTICAST_OFF)
@pytest.mark.parametrize(
    ("flags", "fused", "custom"),
    [
        (["--tensor-parallel-size", "2"], False, False),
        (["--tensor-parallel-size", "2", *FUSED], True, True),
        ([], None, True),
    ],
    ids=["two ranks", "two ranks that were told to fuse", "one rank"],
)
def test_ranks_do_without_multicast_where_there_is_none(
    variable: str,
    flags: list[str],
    fused: bool | None,
    custom: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in MULTICAST_OFF:
        monkeypatch.delenv(name, raising=False)
    args = parse_arguments(["--model", "x", *flags])
    untouched = args.compilation_config.pass_config.fuse_allreduce_rms
    avoid_multicast(args)
    assert args.compilation_config.pass_config.fuse_allreduce_rms is untouched
    monkeypatch.setenv(variable, MULTICAST_OFF[variable])
    avoid_multicast(args)
    assert args.compilation_config.pass_config.fuse_allreduce_rms is fused
    assert args.disable_custom_all_reduce is not custom


def test_without_multicast_it_is_as_with_the_flags_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are what was seen to run on two GPUs."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    ranks = ["--model", "x", "--tensor-parallel-size", "2"]
    not_fused = '{"pass_config": {"fuse_allreduce_rms": false}}'
    by_hand = parse_arguments(
        [*ranks, "--disable-custom-all-reduce", "--compilation-config", not_fused]
    )
    args = parse_arguments(ranks)
    avoid_multicast(args)
    assert vars(args) == vars(by_hand)


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [([], "triton"), (["--moe-backend", "flashinfer-trtllm"], "flashinfer_trtllm")],
)
def test_experts_have_kernels_that_take_them_as_loaded(flags: list[str], kernels: str) -> None:
    args = parse_arguments(["--model", "x", *flags])
    keep_experts_plain(args)
    assert args.moe_backend == kernels


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ([], None, "1"),
        ([], "3", "3"),
        (["--kv-cache-memory-bytes", "2G"], None, None),
        (["--kv-cache-memory-bytes", "2G"], "3", "3"),
    ],
    ids=["neither", "the variable", "the flag", "both"],
)
def test_the_default_size_of_the_cache_overrides_nothing_that_was_asked(
    flags: list[str], before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without GPUs, where vLLM takes the variable's word against the flag's."""
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": before} if before else {})
    _cpu_defaults(parse_arguments(["--model", "x", *flags]))
    assert os.environ.get("VLLM_CPU_KVCACHE_SPACE") == after


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ([], "processed_logprobs"),
        (["--deterministic"], "raw_logprobs"),
        (["--logprobs-mode", "raw_logprobs"], "raw_logprobs"),
        (["--deterministic", "--logprobs-mode", "processed_logprobs"], "processed_logprobs"),
    ],
)
def test_logprobs_are_of_what_is_sampled_from_unless_a_flag_says_otherwise(
    flags: list[str], mode: str
) -> None:
    assert parse_arguments(["--model", "any", *flags]).logprobs_mode == mode
