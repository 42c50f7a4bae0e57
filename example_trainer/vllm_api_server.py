"""vLLM's own OpenAI server with /generate and the weight bridge added.

    VLLM_ENABLE_SHARED_WEIGHTS=1 python -u example_trainer/vllm_api_server.py --model Qwen/Qwen2.5-14B-Instruct \\
        --tensor-parallel-size 2 --port 9001 --dtype bfloat16

Takes `vllm serve`'s flags. Ours: --allow-host, --bridge-timeout, --colocate, --deterministic,
--engine-timeout, --inflight-cache, --weight-version, --weight-epoch. Environment:
VLLM_ENABLE_SHARED_WEIGHTS=1 shares the weights with a trainer. LOGDIR is where
vllm_bridge_config.json goes (default: the working directory). VLLM_API_KEY is the key that callers
must have (without: vllm_patching/server/access.py). LOCKSTEP_TIMELINE is a folder for what it did
when (docs/timelines.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by path: import from the repository, and never a sibling file by a bare name.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from atroposlib.utils.log_lines import BoundedLines
from atroposlib.utils.processes import end_forked_with_parent, end_with_parent
from atroposlib.web.bounded_protocol import bounded_protocol
from atroposlib.web.connections import SERVER_KEEPS_SECONDS, connections_allowed
from vllm_patching.compat.sampler import sample_without_compiler
from vllm_patching.compat.server_app import note_stop_signals
from vllm_patching.compat.torchao_logs import quiet_torchao
from vllm_patching.server.flags import (
    fail,
    parse_arguments,
    prepare_deterministic,
    prepare_lora,
    refuse_dev_mode,
    refuse_what_moves_weights,
)

if TYPE_CHECKING:
    from vllm_patching.server.access import Door
    from vllm_patching.server.bridge import BridgeController
    from vllm_patching.server.routes import LockstepService
    from vllm_patching.server.state import VersionSpans
    from vllm_patching.server.timeline import ServerTimeline

quiet_torchao()  # here for the processes too that vLLM spawns: they run this file first

if __name__ == "__mp_main__":
    # This is a process that vLLM has spawned: an engine core, a worker or a coordinator of
    # replicas. They rename themselves, so `pkill -f vllm` misses them, and vLLM lets an engine core
    # outlive its server.
    end_with_parent()
    end_forked_with_parent()

WORKER_EXTENSION = "vllm_patching.worker.extension.LockstepWorkerExtension"
CONNECTION_SECONDS = 60.0
"""For the head of a request, for its body, and for which a client may leave an answer untaken."""
MOST_BODY = 256 << 20
"""Bytes of a request's body. vLLM itself reads a body of any length into memory."""
LAST_ANSWERS_SECONDS = 2
"""Limit of the wait of an ending server for answers that are on their way out."""
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Variables that switch NVLink multicast off in NCCL, PyTorch and NVSHMEM."""


def check_model(model: str, reads_weights: bool = True) -> None:
    """End with one line if `model` is neither a folder with a checkpoint nor a model that the Hub
    or its cache knows.

    Args:
        reads_weights: vLLM will read the folder's weight files, so damaged ones are refused too.
    """
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            fail(
                f"--model {model}: the folder has no config.json; give the folder of a Hugging Face checkpoint"
            )
        for file in sorted(Path(model).glob("*.safetensors")) if reads_weights else ():
            if damage := damage_of(file):
                fail(f"--model {model}: {file.name} {damage}: download or copy the file again")
        return
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        fail(
            f"--model {model}: no such folder; give the folder of a Hugging Face checkpoint, or a model id like Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        hf_hub_download(model, "config.json")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        fail(
            f"--model {model}: no such folder here, and the Hugging Face Hub does not give it ({reason})"
        )


def damage_of(file: Path) -> str:
    """Return why a safetensors file cannot be read, or cannot be whole; empty if it can."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # compares the header with the file's size
            return ""
    except (OSError, SafetensorError) as error:
        return f"cannot be read ({error})"


def config_file(model: str) -> Path:
    """Return the config.json of a model that `check_model` has accepted."""
    from huggingface_hub import hf_hub_download

    folder = Path(model)
    return (
        folder / "config.json" if folder.is_dir() else Path(hf_hub_download(model, "config.json"))
    )


def check_port(host: str | None, port: int) -> None:
    """End with one line if another process listens on the port already."""
    with socket.socket(socket.AF_INET6 if host and ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", port))
            probe.listen()
        except OSError as error:
            fail(
                f"cannot listen on port {port} ({error.strerror}): stop what uses it (`ss -ltnp`) or pass another --port"
            )


def listen_alone(port: int) -> None:
    """Let no process that is forked from this one hold the port.

    vLLM opens it before it forks its engine. Where this process is killed, the engine ends a little
    later, and who starts the server again at once would find the port in use.
    """

    def let_go() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    held = (
                        copy.family in (socket.AF_INET, socket.AF_INET6)
                        and copy.getsockname()[1] == port
                    )
            except OSError:  # no socket
                continue
            if held:
                os.dup2(
                    nothing, int(name)
                )  # not closed: another object has the number, and may close it
        os.close(nothing)

    if sys.platform == "linux":  # other systems lack the folder
        os.register_at_fork(after_in_child=let_go)


def prepare_environment(args: argparse.Namespace, shared: bool) -> None:
    """Settings that must stand before vLLM's engine starts."""
    # Worker processes import vllm_patching by name, also when they are spawned.
    root = str(Path(__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
    if not sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")
        os.environ.setdefault("VLLM_LOGGING_COLOR", "0")
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(SERVER_KEEPS_SECONDS))
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _cpu_defaults(args)
        return
    if not args.deterministic and sample_without_compiler(os.environ):
        print(
            "[vLLM Patch] no CUDA compiler (nvcc) found, which FlashInfer's sampler needs: vLLM's own samples top-p and "
            "top-k (VLLM_USE_FLASHINFER_SAMPLER=0)",
            flush=True,
        )
    if shared or args.deterministic:
        keep_experts_plain(args)
    if shared and args.tensor_parallel_size > 1:
        # Seen to end in illegal memory accesses on virtual machines; NCCL's own all-reduce is used
        # instead.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    if not args.deterministic:  # that mode has no fused sums
        avoid_multicast(args)


def keep_experts_plain(args: argparse.Namespace) -> None:
    """Choose vLLM's Triton kernels for experts, unless --moe-backend names others.

    They take weights as they are loaded. FlashInfer's swap, pad or reorder them first, and vLLM
    prefers those on Blackwell GPUs.
    """
    if args.moe_backend == "auto":
        args.moe_backend = "triton"


def avoid_multicast(args: argparse.Namespace) -> None:
    """Switch off what ranks of vLLM do by NVLink multicast, if the environment has none by its
    variables.

    vLLM's fused sum and norm chooses it all the same, and the capture of CUDA graphs ends in an
    illegal memory access.
    """
    said = [
        f"{name}={value}" for name, value in MULTICAST_OFF.items() if os.environ.get(name) == value
    ]
    passes = args.compilation_config.pass_config
    if said and args.tensor_parallel_size > 1 and passes.fuse_allreduce_rms is None:
        passes.fuse_allreduce_rms = False
        args.disable_custom_all_reduce = True
        print(
            f"[vLLM Patch] {said[0]}: no NVLink multicast, so vLLM's fused sum and norm and its own all-reduce are off "
            "(--compilation-config with pass_config.fuse_allreduce_rms decides otherwise)",
            flush=True,
        )


def _refuse_adapters(args: argparse.Namespace) -> None:
    """End with one line, before the load, if the model cannot have adapters here."""
    from vllm.triton_utils import HAS_TRITON

    from vllm_patching.weights.families import FAMILIES, Geometry, UnsupportedModel, own_family

    layers: tuple[int, ...] = ()
    try:
        path = config_file(args.model)
        config = json.loads(path.read_text(encoding="utf-8"))
        names = ", ".join(map(str, config.get("architectures") or ()))
        known = not names or own_family(config) is not None
        if names and known:
            layers = Geometry.from_config(config, where=str(path)).sparse_layers
    except (AttributeError, OSError, TypeError, ValueError, UnsupportedModel):
        return  # vLLM, or the worker's setup of adapters, names the reason
    if not known:
        fail(
            f"--enable-lora: --model {args.model} is a {names}, which has no adapters here. Leave "
            f"--enable-lora out and train all weights, or take one of {', '.join(FAMILIES)}"
        )
    if layers and not HAS_TRITON:  # adapters around experts are Triton kernels
        fail(
            f"--enable-lora: --model {args.model} is a mixture ({names}). vLLM computes "
            "adapters of mixtures with Triton, which its CPU build lacks. Leave --enable-lora out and train all "
            "weights, or use a machine with an NVIDIA GPU"
        )


def _cpu_defaults(args: argparse.Namespace) -> None:
    if args.enable_return_routed_experts:
        fail(
            "--enable-return-routed-experts needs a GPU: vLLM's CPU build does not keep the experts "
            "of a token; leave the flag out, and train without --router-replay"
        )
    if args.kv_cache_memory_bytes is None:  # which vLLM would give way to the variable
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # The sampler would otherwise be compiled at the first request: 15 s, and a C++ compiler that a
    # machine may not have.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    args.enforce_eager = True
    if args.tensor_parallel_size == 1 and args.distributed_executor_backend is None:
        # vLLM would start a worker process and poll shared memory for its answers without sleeping,
        # which takes a core from other processes. By its class's name the executor that
        # needs no second process is accepted.
        args.distributed_executor_backend = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    if args.dtype in ("bfloat16", "float16", "half"):
        print(
            f"[vLLM Patch] --dtype {args.dtype}: without a GPU the weights are served in float32 "
            "instead. (16-bit kernels of vLLM's CPU build are not dependable on every processor.)",
            flush=True,
        )
    args.dtype = "float32"


async def verify_deterministic(engine: Any, logger: Any) -> dict[str, Any]:
    """The report of the self-test. Ends with one line if a kernel depends on the batch here."""
    from vllm_patching.batch_invariant.mode import DeterminismRefused, verify

    try:
        report = await verify(engine)
    except DeterminismRefused as refusal:
        fail(str(refusal))
    logger.info(
        "[Deterministic] ✓ Self-test: %d batches with the same bits (%.1f s)",
        report["checks"],
        report["seconds"],
    )
    return report


async def watch_engine(engine: Any, args: argparse.Namespace, service: LockstepService) -> None:
    """Have the server's health follow the engine's progress."""
    from vllm_patching.server.engine_watch import EngineWatch

    bridge = service.bridge
    watch = EngineWatch(
        engine,
        args.engine_timeout,
        lambda: bridge is not None and bridge.holds_engine,
        service.end_requests,
    )
    if bridge is not None:
        bridge.engine_trouble = lambda: watch.trouble
    await watch.start(args.bridge_timeout)
    service.watch = watch


async def start_bridge(
    engine: Any, args: argparse.Namespace, spans: VersionSpans, timeline: ServerTimeline
) -> BridgeController:
    """Start the weight bridge.

    Raises:
        BridgeRefusal, ConfigFileError, UnsupportedVllm: it cannot be started.
    """
    from vllm_patching.server.bridge import BridgeController

    folder = Path(os.environ.get("LOGDIR", "."))
    facts = (args.model, args.dtype, args.bridge_timeout, folder)
    keep = args.inflight_cache == "keep"
    bridge = BridgeController(engine, *facts, spans, keep, args.port, timeline)
    bridge.state.weight_version = args.weight_version
    bridge.state.weight_epoch = args.weight_epoch
    try:
        await bridge.start()
        if args.colocate:
            await bridge.turns.open()
    except BaseException:
        await bridge.stop()
        raise
    return bridge


async def run_and_clean_up(
    run_server: Callable[..., Awaitable[None]],
    args: argparse.Namespace,
    service: LockstepService,
    timeline: ServerTimeline,
    logger: Any,
) -> None:
    """Run vLLM's server with bounded connections, and stop what was started beside it.

    Raises:
        SystemExit: the server ended without a signal, as it does after the death of its engine.
    """
    stop_signals = note_stop_signals(asyncio.get_running_loop())
    try:
        # Clients without the key cause lines in both logs.
        for log in (logger, logging.getLogger("uvicorn.error")):
            log.addFilter(BoundedLines())
        most = connections_allowed(lambda line: print(f"[vLLM Patch] {line}", flush=True))
        await run_server(args, http=bounded_protocol(CONNECTION_SECONDS, most, logger, MOST_BODY))
    finally:
        if service.watch is not None:
            await service.watch.stop()
        if service.bridge is not None:
            await service.bridge.stop()
        timeline.close()
    if not stop_signals:
        logger.error("[vLLM Patch] The server ends with status 1: %s", service.unavailable())
        raise SystemExit(1)


def build_service(args: argparse.Namespace, module: Any, shared: bool, door: Door) -> None:
    """Hook our routes and the bridge into vLLM's server."""
    from vllm_patching.compat.loggers import stop_in_one_line, worker_logger
    from vllm_patching.compat.outputs import forget_unsent, take_logprobs_together
    from vllm_patching.compat.server_app import end_at_once_while_loading, wrap_server
    from vllm_patching.protocol.timeline import open_timeline
    from vllm_patching.server.generate import Generator
    from vllm_patching.server.lora import AdapterSpans, LoraController
    from vllm_patching.server.metrics import attach_metrics
    from vllm_patching.server.routes import NOT_SHARED, LockstepService, attach
    from vllm_patching.server.state import VersionSpans
    from vllm_patching.server.timeline import ServerTimeline

    logger = worker_logger("lockstep.server")
    service = LockstepService()
    timeline = ServerTimeline(open_timeline("generator", f"{socket.gethostname()}-{args.port}"))
    background: set[asyncio.Task[None]] = set()
    kind = AdapterSpans if args.enable_lora else VersionSpans
    spans = kind(args.weight_version, args.weight_epoch)
    service.weights = lambda: (spans.weights.version, spans.weights.epoch)

    def bridge_state() -> dict[str, Any]:
        if service.bridge is not None:
            return service.bridge.status()
        return {"weight_version": spans.weights.version, "weight_epoch": spans.weights.epoch}

    def on_app(app: Any) -> None:
        attach(app, service, door, timeline)
        attach_metrics(app, bridge_state)

    loaded = end_at_once_while_loading(module)

    async def on_state(engine: Any, state: Any) -> None:
        loaded()
        await opened(open_service(engine))
        task = asyncio.create_task(announce(state, args, logger))
        background.add(task)
        task.add_done_callback(background.discard)

    async def open_service(engine: Any) -> None:
        forget_unsent(engine)
        stop_in_one_line(engine)
        if args.deterministic:
            service.deterministic = await verify_deterministic(engine, logger)
        if shared:
            service.bridge = await start_bridge(engine, args, spans, timeline)
        elif not args.enable_lora:
            logger.warning("[vLLM Patch] %s", NOT_SHARED)
        if isinstance(spans, AdapterSpans):
            lora = LoraController(engine, args.model, args.bridge_timeout, spans)
            await lora.start()
            service.lora = lora
        await watch_engine(engine, args, service)
        service.generator = Generator(engine, spans)
        service.engine = engine

    take_logprobs_together()
    wrap_server(module, on_app, on_state)
    module.run_lockstep_server = partial(
        run_and_clean_up, module.run_server, args, service, timeline, logger
    )


async def opened(opening: Awaitable[None]) -> None:
    """Wait until the service is open. Ends with one line if the engine or a file refuses it."""
    from vllm_patching.compat.versions import UnsupportedVllm
    from vllm_patching.protocol.messages import BridgeRefusal
    from vllm_patching.server.config_file import ConfigFileError
    from vllm_patching.server.lora import LoraRefusal

    try:
        await opening
    except (BridgeRefusal, ConfigFileError, LoraRefusal, UnsupportedVllm) as error:
        fail(str(error))


async def announce(state: Any, args: argparse.Namespace, logger: Any) -> None:
    """Log the line that people wait for once the server really accepts connections."""
    server = getattr(state, "server", None)
    while server is None or not server.started:
        await asyncio.sleep(0.05)
        server = getattr(state, "server", None)
    # On SIGTERM vLLM stops its engine first: requests that are under way then get no
    # answer any more.
    server.config.timeout_graceful_shutdown = LAST_ANSWERS_SECONDS
    host = args.host or "0.0.0.0"
    logger.info(
        "Uvicorn running on http://%s:%d (vLLM with /generate and /bridge)",
        f"[{host}]" if ":" in host else host,
        args.port,
    )


def main(arguments: list[str] | None = None) -> None:
    shared = os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0") == "1"
    from vllm_patching.compat.versions import UnsupportedVllm, require_device, require_supported

    try:
        require_supported()
        require_device()
    except UnsupportedVllm as error:
        fail(str(error))
    from vllm_patching.compat.server_app import server_module, validate_server_args
    from vllm_patching.engine_core import extension as engine_core
    from vllm_patching.server import turns
    from vllm_patching.server.access import make_door

    args = parse_arguments(arguments)
    check_model(args.model, reads_weights=args.load_format != "dummy")
    check_port(args.host, args.port)
    listen_alone(args.port)
    end_forked_with_parent()
    prepare_environment(args, shared)
    door = make_door(args, os.environ)
    if shared:
        refuse_dev_mode("VLLM_ENABLE_SHARED_WEIGHTS=1")
        refuse_what_moves_weights(args)
        args.worker_extension_cls = WORKER_EXTENSION
    if refusal := turns.prepare(args, shared, os.environ):
        fail(refusal)
    if args.deterministic:
        prepare_deterministic(args, shared)
    if args.enable_lora:
        refuse_dev_mode("--enable-lora")
        prepare_lora(args, shared)
        _refuse_adapters(args)
    import uvloop

    engine_core.prepare_environment(os.environ)
    validate_server_args(args)
    module = server_module()
    engine_core.install_before_fork()
    build_service(args, module, shared, door)
    uvloop.run(module.run_lockstep_server())


if __name__ == "__main__":
    main()
