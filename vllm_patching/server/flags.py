"""The server's command line: vLLM's flags, ours, and what of both cannot be had together; each
refusal is one line.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import NoReturn

from vllm_patching.compat.server_app import make_server_parser

LORA_EXTENSION = "vllm_patching.worker.lora.LoraWorkerExtension"
ADAPTERS_AT_ONCE, ADAPTERS_IN_MEMORY = 2, 8
DEFAULT_PORT = 9001
DEFAULT_BRIDGE_TIMEOUT = 120.0
DEFAULT_ENGINE_TIMEOUT = 30.0
_ONE_FRONT_END = (
    "all replicas of a server are updated together, by one front end on their host: leave it out, and start one server for "
    "each host"
)
_SPREAD_REPLICAS = {
    "data_parallel_rank": (None, _ONE_FRONT_END),
    "data_parallel_start_rank": (None, _ONE_FRONT_END),
    "data_parallel_external_lb": (False, _ONE_FRONT_END),
    "data_parallel_hybrid_lb": (False, _ONE_FRONT_END),
    "data_parallel_multi_port_external_lb": (False, _ONE_FRONT_END),
    "data_parallel_backend": ("mp", _ONE_FRONT_END),
    "nnodes": (1, _ONE_FRONT_END),
    "headless": (False, _ONE_FRONT_END),
}
"""Flag -> the value that is allowed, and why no other is."""


def fail(message: str) -> NoReturn:
    """End with one line that gives the error and the remedy."""
    print(f"ERROR vllm_api_server: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def one_line_errors(base: type) -> type:
    """A parser class that answers a wrong flag with one line and the nearest right one, not with
    pages of usage.
    """

    class Parser(base):
        def error(self, message: str) -> NoReturn:
            if "unrecognized arguments:" in message:
                flag = message.split("unrecognized arguments:")[1].split()[0]
                near = difflib.get_close_matches(
                    flag.split("=")[0], self._option_string_actions, n=1
                )
                message = f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "")
            fail(f"{message} (--help lists the flags)")

    return Parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that vLLM's own server does not have."""
    parser.add_argument(
        "--bridge-timeout",
        type=float,
        default=DEFAULT_BRIDGE_TIMEOUT,
        help="seconds that each step of a weight update may take before it is given up (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-timeout",
        type=float,
        default=DEFAULT_ENGINE_TIMEOUT,
        help="seconds without a step of vLLM's engine after which the server is unhealthy and ends its requests with 503. "
        "Pauses do not count. A step of a new shape, which may compile, has ten times as long (default: %(default)s)",
    )
    parser.add_argument(
        "--weight-version",
        type=int,
        default=0,
        help="the optimizer step that --model was saved at, which /generate reports until an update (default: %(default)s)",
    )
    parser.add_argument(
        "--weight-epoch",
        type=int,
        default=0,
        help="weight epoch of the trainer that saved --model, which /generate reports beside the "
        "version; 0: no trainer did (default: %(default)s)",
    )
    parser.add_argument(
        "--inflight-cache",
        choices=["recompute", "keep"],
        default="recompute",
        help="keys and values of requests that run across a weight update. With recompute, "
        "they are computed again, so that every token's logprob is that of one "
        "version. Keep is faster, but their next tokens mix both (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        default=os.environ.get("VLLM_BATCH_INVARIANT") == "1",
        help="sample with kernels whose bits do not depend on the batch, and that a trainer with --deterministic runs too; "
        "also switched on by VLLM_BATCH_INVARIANT=1",
    )
    parser.add_argument(
        "--colocate",
        action="store_true",
        help="take turns with a trainer (--colocate) on the same GPU: it gets the keys' and values' memory while it computes",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="without a key: another name by which clients call this server, such as that of a proxy or container; may be "
        "given several times",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """vLLM's flags with our defaults, checked as far as that goes without loading anything."""
    try:
        parser = make_server_parser(
            "vLLM's OpenAI server with /generate and the weight bridge.", one_line_errors
        )
    except RuntimeError as error:
        if "device type" not in str(error):
            raise
        fail(
            "vLLM finds no device that this build of it computes on. Is the GPU visible (nvidia-smi, CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')!r})? For a machine without one: scripts/setup.sh --cpu"
        )
    add_flags(parser)
    parser.set_defaults(port=DEFAULT_PORT, max_loras=ADAPTERS_AT_ONCE, logprobs_mode=None)
    args = parser.parse_args(arguments)
    args.model = getattr(args, "model_tag", None) or args.model
    # Logprobs are of the distribution that is sampled from. Deterministic mode allows no other than
    # the raw one.
    args.logprobs_mode = args.logprobs_mode or (
        "raw_logprobs" if args.deterministic else "processed_logprobs"
    )
    for flag, seconds in (
        ("--bridge-timeout", args.bridge_timeout),
        ("--engine-timeout", args.engine_timeout),
    ):
        if not seconds > 0:
            fail(f"{flag} {seconds:g} must be larger than 0 (seconds)")
    if args.api_server_count not in (None, 1):
        fail(
            f"--api-server-count {args.api_server_count}: one process must own the bridge's state "
            "and count which weights each token was sampled with. Leave it out, and start "
            "several servers where one is not enough"
        )
    for flag, value in (
        ("--weight-version", args.weight_version),
        ("--weight-epoch", args.weight_epoch),
    ):
        if value < 0:
            fail(f"{flag} {value} must be 0 or larger")
    return args


def refuse_what_moves_weights(args: argparse.Namespace) -> None:
    """End with one line if a flag would move, pack or multiply the weights under the bridge."""
    refused = {
        "enable_sleep_mode": (False, "sleep mode moves the weights' memory"),
        "pipeline_parallel_size": (1, "only tensor parallelism is supported"),
        "quantization": (None, "quantised weights differ from the trainer's"),
        "cpu_offload_gb": (0, "offloaded weights move"),
        "weight_transfer_config": (
            None,
            "vLLM's own way of updating weights would overwrite the trainer's unseen",
        ),
        "enable_eplb": (False, "balancing experts moves weights"),
        "enable_expert_parallel": (
            False,
            "it gives each rank whole experts, and the bridge sends a part of every expert; leave it "
            "out, and --tensor-parallel-size splits the experts",
        ),
        "enable_elastic_ep": (False, "replicas that come and go would miss updates"),
        **_SPREAD_REPLICAS,
        "data_parallel_size_local": (args.data_parallel_size, _ONE_FRONT_END),
    }
    for name, (allowed, why) in refused.items():
        value = getattr(args, name, allowed)
        if value not in (allowed, None):
            fail(
                f"--{name.replace('_', '-')} {value} cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1: {why}"
            )


def refuse_dev_mode(bridge: str) -> None:
    """End with one line if vLLM's routes for developers are on, by which any client could change
    the server under the bridge.
    """
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0").strip() not in ("", "0"):
        fail(
            f"VLLM_SERVER_DEV_MODE={os.environ['VLLM_SERVER_DEV_MODE']} cannot be combined with {bridge}: /pause, /sleep, "
            "/collective_rpc and /update_weights would move engine and weights unseen by the trainer; "
            "`unset VLLM_SERVER_DEV_MODE`"
        )


def prepare_lora(args: argparse.Namespace, shared: bool) -> None:
    """Settings for exchanging LoRA adapters while requests run.

    Ends with one line if another flag forbids it.
    """
    if shared:
        fail(
            "--enable-lora cannot be combined with VLLM_ENABLE_SHARED_WEIGHTS=1: the weights under adapters stay as they are; "
            "`unset VLLM_ENABLE_SHARED_WEIGHTS`, or leave --enable-lora out"
        )
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if getattr(args, name, 1) not in (1, None):
            fail(
                f"--{name.replace('_', '-')} {getattr(args, name)} cannot be combined with --enable-lora: only 1 is supported; "
                "start several servers instead"
            )
    if args.max_cpu_loras is None:
        args.max_cpu_loras = max(ADAPTERS_IN_MEMORY, args.max_loras)
    if args.max_cpu_loras < 2:
        fail(
            "--max-cpu-loras must be at least 2: the old adapter is kept until its last request has ended"
        )
    args.worker_extension_cls = LORA_EXTENSION


def prepare_deterministic(args: argparse.Namespace, shared: bool) -> None:
    """Flags and environment of deterministic mode. Ends with one line where it cannot be had."""
    from vllm_patching.batch_invariant.mode import DeterminismRefused, prepare_server

    try:
        prepare_server(args, shared)
    except DeterminismRefused as refusal:
        fail(str(refusal))
