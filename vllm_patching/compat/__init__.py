"""Everything that differs between the vLLM versions supported (0.26 to 0.32), and nothing else."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SUPPORTED = ">= 0.26 and < 0.33"


class UnsupportedVllm(RuntimeError):
    """vLLM is missing, or is a version in which a seam that the project uses cannot be found."""


def vllm_version() -> str:
    """The version of the vLLM that is imported, which a CPU build under another distribution name reports too."""
    return str(importlib.import_module("vllm").__version__)


def worker_logger(name: str) -> logging.Logger:
    """A logger whose lines appear in vLLM's own log, in the server and in every worker process."""
    logger: logging.Logger = importlib.import_module("vllm.logger").init_logger(f"vllm.{name}")
    return logger


def keep_cpu_weights_plain() -> None:
    """Make vLLM's CPU linear layers multiply with the parameter itself.

    By default they pack a private copy of the weight after loading and leave the parameter empty, or stale when it is tied,
    so that nothing written to the parameter would ever be used. Call before the model is built; does nothing elsewhere.
    """
    import torch

    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def use_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise UnsupportedVllm(_seam_missing("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"))
    utils.dispatch_cpu_unquantized_gemm = use_the_parameter  # type: ignore[attr-defined]


def server_module() -> ModuleType:
    """The module whose run_server, build_app and init_app_state make vLLM's OpenAI server."""
    for name in ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                continue
            raise
        if all(hasattr(module, seam) for seam in ("run_server", "build_app", "init_app_state")):
            return module
    raise UnsupportedVllm(_seam_missing("run_server, build_app and init_app_state"))


def make_server_parser(description: str, parser_class_hook: Callable[[type], type]) -> argparse.ArgumentParser:
    """vLLM's own server flags, on a parser class that `parser_class_hook` may extend."""
    base = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    for name in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        parser: argparse.ArgumentParser = module.make_arg_parser(parser_class_hook(base)(description=description))
        return parser
    raise UnsupportedVllm(_seam_missing("make_arg_parser"))


def validate_server_args(args: argparse.Namespace) -> None:
    """vLLM's own check of its parsed flags."""
    for name in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        module.validate_parsed_serve_args(args)
        return


def wrap_server(
    module: ModuleType,
    on_app: Callable[[Any], None],
    on_state: Callable[[Any, Any], Awaitable[None]],
) -> None:
    """Call `on_app(app)` when vLLM has built its app and `on_state(engine_client, app.state)` when its engine is ready."""
    build_app, init_app_state = module.build_app, module.init_app_state

    def build_app_and_extend(*args: Any, **kwargs: Any) -> Any:
        app = build_app(*args, **kwargs)
        on_app(app)
        return app

    async def init_app_state_and_extend(engine_client: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        await init_app_state(engine_client, state, *args, **kwargs)
        await on_state(engine_client, state)

    module.build_app = build_app_and_extend  # type: ignore[attr-defined]
    module.init_app_state = init_app_state_and_extend  # type: ignore[attr-defined]


async def pause_and_keep(engine: Any, clear_cache: bool) -> None:
    """Stop scheduling and keep the requests; returns when no step is in flight.

    vLLM's own pause_generation does the same and then sleeps for 20 ms, so that outputs reach their callers first; ours may
    reach them later, see follow_outputs.

    Args:
        clear_cache: drop every cached key and value; running requests compute theirs anew when they go on.
    """
    if clear_cache:
        # The front end's and the engine's caches of processed images must be emptied together.
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


async def ask_engine_core(engine: Any, method: str, *args: Any) -> Any:
    """Call a method of the engine core, as vLLM's own calls to it do.

    Raises:
        UnsupportedVllm: it has no such method, or there is no such way to call one.
    """
    client = engine.engine_core
    if not hasattr(client, "call_utility_async"):
        raise UnsupportedVllm(_seam_missing("EngineCoreClient.call_utility_async"))
    try:
        return await client.call_utility_async(method, *args)
    except Exception as error:
        if f"no attribute '{method}'" in str(error):
            raise UnsupportedVllm(
                f"vLLM ({vllm_version()}) has not loaded the plugin of vllm_patching/plugin, which gives its engine core "
                f"{method}: is the version {SUPPORTED}, and does nothing take that folder out of PYTHONPATH?"
            ) from error
        raise


def follow_outputs(engine: Any, known: Callable[[str], None], before: Callable[[float], None]) -> None:
    """Be told what the engine's front end does.

    Args:
        known: called with the id (the one its caller chose) of each request that it has begun to follow.
        before: called before outputs are handed to their requests, with the moment at which they left the engine
            (time.monotonic, seconds).
    """
    processor = engine.output_processor
    add, process = processor.add_request, processor.process_outputs

    def add_and_tell(request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = add(request, *args, **kwargs)
        known(getattr(request, "external_req_id", None) or request.request_id)
        return answer

    def tell_and_process(outputs: Any, moment: float | None = None, *args: Any, **kwargs: Any) -> Any:
        if moment is not None:
            before(moment)
        return process(outputs, moment, *args, **kwargs)

    processor.add_request, processor.process_outputs = add_and_tell, tell_and_process


def take_logprobs_together() -> None:
    """Have vLLM's front end put the logprobs of all new tokens of a request into its flat lists at once, where nobody asked for
    alternatives or text; it goes through them one by one otherwise.
    """
    processor = importlib.import_module("vllm.v1.engine.logprobs").LogprobsProcessor
    flat_kind = importlib.import_module("vllm.logprobs").FlatLogprobs
    if not hasattr(processor, "_update_sample_logprobs"):
        raise UnsupportedVllm(_seam_missing("LogprobsProcessor._update_sample_logprobs"))
    one_by_one = processor._update_sample_logprobs

    def together(self: Any, rows: Any) -> None:
        flat = self.logprobs
        if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(flat, flat_kind):
            one_by_one(self, rows)
            return
        token_ids, logprobs, ranks = rows[:3]
        sampled, first = logprobs[:, 0].tolist(), len(flat.logprobs)
        flat.start_indices.extend(range(first, first + len(sampled)))
        flat.end_indices.extend(range(first + 1, first + 1 + len(sampled)))
        flat.token_ids.extend(token_ids[:, 0].tolist())
        flat.logprobs.extend(sampled)
        flat.ranks.extend(ranks.tolist())
        flat.decoded_tokens.extend([None] * len(sampled))
        self.cumulative_logprob += sum(sampled)

    processor._update_sample_logprobs = together


class HeldOutputs:
    """Makes the engine's front end wait, when asked, before it hands the next outputs to their requests."""

    def __init__(self, engine: Any) -> None:
        """Call from within the event loop of `engine`."""
        client = engine.engine_core
        if not hasattr(client, "get_output_async"):
            raise UnsupportedVllm(_seam_missing("EngineCoreClient.get_output_async"))
        fetch = client.get_output_async
        self._free = asyncio.Event()
        self._free.set()
        self._timer: asyncio.TimerHandle | None = None

        async def fetch_and_wait() -> Any:
            outputs = await fetch()
            await self._free.wait()
            return outputs

        client.get_output_async = fetch_and_wait

    def hold(self, seconds: float) -> None:
        """Hand nothing out until `release`, or for that long."""
        self.release()
        self._free.clear()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._free.set)

    def release(self) -> None:
        """Hand out what has come in the meantime, and whatever comes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free.set()


def salt_prefix_cache(engine: Any, salt: Callable[[], str]) -> None:
    """Have every request accepted from now on share cached prefixes only with requests of the same salt."""
    processor = engine.input_processor
    if not hasattr(processor, "assign_request_id"):
        raise UnsupportedVllm(_seam_missing("InputProcessor.assign_request_id"))
    assign = processor.assign_request_id

    def assign_and_salt(request: Any) -> None:
        assign(request)
        request.cache_salt = f"{salt()}{request.cache_salt or ''}"

    processor.assign_request_id = assign_and_salt


async def tokenizer_of(engine: Any) -> Any:
    """The engine's tokenizer; a coroutine in some versions."""
    tokenizer = engine.get_tokenizer()
    return await tokenizer if inspect.isawaitable(tokenizer) else tokenizer


def output_token_counts(engine: Any) -> dict[str, int]:
    """How many tokens each running request has been given so far, by the request id that its caller chose."""
    counts = {}
    for state in engine.output_processor.request_states.values():
        request_id = getattr(state, "external_req_id", None) or state.request_id
        if state.detokenizer is not None:
            counts[request_id] = state.detokenizer.num_output_tokens()
    return counts


def has_requests(engine: Any) -> bool:
    """Whether the engine's front end follows any request."""
    return bool(engine.output_processor.request_states)


def logprobs_mode(engine: Any) -> str:
    """Which logprobs the engine hands out (`--logprobs-mode`): `processed_logprobs`, of the distribution that is sampled from,
    or `raw_logprobs`, before temperature and penalties; or logits of either kind.
    """
    return str(engine.model_config.logprobs_mode)


def engine_is_dead(engine: Any) -> bool:
    """Whether the engine's process has ended."""
    return bool(engine.errored)


def _seam_missing(seam: str) -> str:
    return f"this vLLM ({vllm_version()}) does not have {seam}; install a version {SUPPORTED}"


def lora_request(name: str, adapter_id: int, path: str) -> Any:
    """What a request carries to be sampled with an adapter."""
    return importlib.import_module("vllm.lora.request").LoRARequest(name, adapter_id, path)


def adapter_manager(worker: Any) -> Any:
    """The part of a worker that holds its LoRA adapters.

    Raises:
        UnsupportedVllm: it is not where the supported versions have it.
    """
    manager = getattr(getattr(worker.model_runner, "lora_manager", None), "_adapter_manager", None)
    seams = ("add_adapter", "activate_adapter", "remove_adapter", "list_adapters", "lora_index_to_id", "capacity")
    if not all(hasattr(manager, seam) for seam in seams):
        raise UnsupportedVllm(_seam_missing("model_runner.lora_manager._adapter_manager"))
    return manager


def add_adapter(
    manager: Any, adapter_id: int, rank: int, scale: float, projections: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Give a worker's manager an adapter from tensors, without vLLM's own reading of files.

    The manager multiplies each lora_B by the scale, in place. The adapter is put into a slot at once if one is free; else vLLM
    does that when the adapter is first used.
    """
    layer = importlib.import_module("vllm.lora.lora_weights").LoRALayerWeights
    model = importlib.import_module("vllm.lora.lora_model").LoRAModel
    layers = {
        name: layer(name, rank, 1, matrices["lora_A"], matrices["lora_B"], scaling=scale)
        for name, matrices in projections.items()
    }
    manager.add_adapter(model(adapter_id, rank, layers))
    if None in manager.lora_index_to_id:
        manager.activate_adapter(adapter_id)


def replace_batch_invariant(
    rms_norm: Callable[..., Any],
    linear: Callable[..., Any],
    log_softmax: Callable[..., Any],
    token_logprobs: Callable[..., Any],
    softmax: Callable[..., Any],
) -> list[str]:
    """Put functions in the place of those that vLLM's batch-invariant mode uses; call before a worker sets up its device.

    Args:
        rms_norm: (x, weight, eps, residual) -> y, or (y, new residual).
        linear: (x, weight, bias) -> y.
        log_softmax: of logits in the model's dtype, float32, for the V1 model runner.
        token_logprobs: (logits, token ids [tokens, k]) -> [tokens, k], for the V2 model runner.
        softmax: (x, dim, widen), for aten::_softmax on the GPU.

    Returns:
        what was replaced.

    Raises:
        UnsupportedVllm: one of them is missing.
    """
    layers = "vllm.model_executor.layers"
    mode = f"{layers}.batch_invariant"
    if importlib.util.find_spec(mode) is None:  # since 0.27 or later
        mode = "vllm.model_executor.determinism.batch_invariant"
    places = [
        (f"{layers}.layernorm", "", "rms_norm_batch_invariant", rms_norm),
        (f"{layers}.linear", "", "linear_batch_invariant", linear),
        (f"{layers}.vocab_parallel_embedding", "", "linear_batch_invariant", linear),
        (mode, "", "softmax_batch_invariant", softmax),
        ("vllm.v1.sample.sampler", "Sampler", "compute_logprobs", staticmethod(log_softmax)),
        ("vllm.v1.worker.gpu.sample.logprob", "", "compute_token_logprobs", token_logprobs),
    ]
    found = []
    for place, inside, name, replacement in places:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UnsupportedVllm(_seam_missing(place)) from error
        owner = getattr(module, inside, None) if inside else module
        if not hasattr(owner, name):
            raise UnsupportedVllm(_seam_missing(".".join(filter(None, (place, inside, name)))))
        found.append((owner, name, replacement))
    for owner, name, replacement in found:
        setattr(owner, name, replacement)
    return [".".join(filter(None, place[:3])) for place in places]


def check_requests(engine: Any, check: Callable[[Any], None]) -> None:
    """Call `check(sampling parameters)` for every request before it is accepted; its ValueError becomes the caller's answer."""
    processor = engine.input_processor
    if not hasattr(processor, "process_inputs"):
        raise UnsupportedVllm(_seam_missing("InputProcessor.process_inputs"))
    process = processor.process_inputs

    def check_and_process(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check(params)
        return process(request_id, prompt, params, *args, **kwargs)

    processor.process_inputs = check_and_process


def graphs_without_compilation() -> Any:
    """vLLM's compilation settings for CUDA graphs of decode steps over layers that run as they are written."""
    config = importlib.import_module("vllm.config").CompilationConfig
    return config(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
