"""Every name of vLLM's that the project hangs on exists in the vLLM that is installed here."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from tests.vllm_patching.compat.vllm_source import VllmSource

ROOT = Path(__file__).resolve().parents[3]

ENGINE, CORE, CLIENT = "vllm.v1.engine", "vllm.v1.engine.core", "vllm.v1.engine.core_client"
LAYERS = "vllm.model_executor.layers"
SEAMS = (
    # server_app.py; the first of two that is there is taken
    "vllm.entrypoints.launchers.api_server.entry:run_server|vllm.entrypoints.openai.api_server:run_server",
    "vllm.entrypoints.launchers.api_server.entry:build_app|vllm.entrypoints.openai.api_server:build_app",
    "vllm.entrypoints.launchers.api_server.entry:init_app_state|vllm.entrypoints.openai.api_server:init_app_state",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser|vllm.entrypoints.openai.cli_args:make_arg_parser",
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args|vllm.entrypoints.openai.cli_args:validate_parsed_serve_args",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    # engine.py
    f"{ENGINE}.async_llm:AsyncLLM.resume_generation",
    f"{ENGINE}.async_llm:AsyncLLM.collective_rpc",
    f"{ENGINE}.async_llm:AsyncLLM.errored",
    f"{ENGINE}.async_llm:AsyncLLM.engine_core",
    f"{ENGINE}.async_llm:AsyncLLM.renderer",
    f"{ENGINE}.async_llm:AsyncLLM.generate",
    "vllm.renderers.base:BaseRenderer.clear_mm_cache_async",
    f"{CLIENT}:AsyncMPClient.pause_scheduler_async",
    f"{CLIENT}:AsyncMPClient.call_utility_async",
    f"{CLIENT}:DPLBAsyncMPClient._call_utility_async",
    f"{CLIENT}:DPLBAsyncMPClient.core_engines",
    "vllm.config.parallel:ParallelConfig.data_parallel_index",
    # outputs.py
    f"{CLIENT}:AsyncMPClient.get_output_async",
    f"{ENGINE}.async_llm:AsyncLLM.output_processor",
    f"{ENGINE}.output_processor:OutputProcessor.add_request",
    f"{ENGINE}.output_processor:OutputProcessor.process_outputs",
    f"{ENGINE}.output_processor:OutputProcessor.request_states",
    f"{ENGINE}.output_processor:RequestState.external_req_id",
    f"{ENGINE}.output_processor:RequestState.detokenizer",
    f"{ENGINE}.detokenizer:IncrementalDetokenizer.num_output_tokens",
    f"{ENGINE}.logprobs:LogprobsProcessor._update_sample_logprobs",
    "vllm.logprobs:FlatLogprobs",
    # requests.py
    f"{ENGINE}.async_llm:AsyncLLM.input_processor",
    f"{ENGINE}.async_llm:AsyncLLM.get_tokenizer",
    f"{ENGINE}.input_processor:InputProcessor.process_inputs",
    f"{ENGINE}.input_processor:InputProcessor.assign_request_id",
    "vllm.config.model:ModelConfig.logprobs_mode",
    # the engine core's plugin
    *(
        f"{CORE}:EngineCore.{name}"
        for name in ("collective_rpc", "resume_scheduler", "step", "step_with_batch_queue")
    ),
    f"{CORE}:EngineCore.is_scheduler_paused",
    f"{CORE}:EngineCoreProc.pause_scheduler",
    f"{CORE}:EngineCoreProc.output_queue",
    *(
        f"{ENGINE}:EngineCoreOutput.{name}"
        for name in ("request_id", "new_token_ids", "new_logprobs")
    ),
    *(
        f"{ENGINE}:EngineCoreOutputs.{name}"
        for name in ("outputs", "timestamp", "scheduler_stats", "finished_requests")
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.requests",
    *(
        f"{CORE}:EngineCore.{name}" for name in ("scheduler", "model_executor", "vllm_config")
    ),  # progress.py
    "vllm.v1.executor.abstract:Executor.execute_model",
    *(
        f"vllm.v1.request:RequestStatus.{name}"
        for name in ("RUNNING", "WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED")
    ),
    *(
        f"vllm.v1.core.sched.output:SchedulerOutput.{name}"
        for name in ("num_scheduled_tokens", "scheduled_new_reqs")
    ),
    "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
    # the workers
    "vllm.v1.worker.gpu_worker:Worker.get_model",
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "vllm.v1.worker.worker_base:WorkerBase.vllm_config",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank",
    "vllm.config.parallel:ParallelConfig.worker_extension_cls",
    # rank_messages.py
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.record_read",
    # cpu_weights.py, cpu_seeds.py, adapters.py, batch_invariant.py
    f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm",
    *(
        f"vllm.v1.worker.gpu_model_runner:GPUModelRunner.{name}"
        for name in ("_sample", "_bookkeeping_sync")
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.discard_request_mask",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor",
    "vllm.lora.request:LoRARequest",
    "vllm.lora.lora_weights:LoRALayerWeights",
    "vllm.lora.lora_model:LoRAModel",
    *(
        f"vllm.lora.model_manager:LoRAModelManager.{name}"
        for name in ("add_adapter", "activate_adapter", "remove_adapter")
    ),
    *(
        f"vllm.lora.model_manager:LoRAModelManager.{name}"
        for name in ("list_adapters", "lora_index_to_id", "capacity")
    ),
    f"{LAYERS}.layernorm:rms_norm_batch_invariant",
    f"{LAYERS}.linear:linear_batch_invariant",
    f"{LAYERS}.vocab_parallel_embedding:linear_batch_invariant",
    f"{LAYERS}.batch_invariant:softmax_batch_invariant|vllm.model_executor.determinism.batch_invariant:softmax_batch_invariant",
    f"{LAYERS}.batch_invariant:init_batch_invariance|vllm.model_executor.determinism.batch_invariant:init_batch_invariance",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.FLASH_ATTN",
    "vllm.config.attention:AttentionConfig.flash_attn_version",
    "vllm.v1.sample.sampler:Sampler.compute_logprobs",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
    "vllm.config:CompilationConfig",
)
"""`module:name` or `module:Class.name`; of several with | between them one is enough."""


def installed() -> Path:
    """The folder of vLLM's package: the one installed, or what LOCKSTEP_VLLM_SOURCE names, for a
    look at another version.
    """
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(os.environ.get("LOCKSTEP_VLLM_SOURCE", str(Path(found.origin).parent)))


@pytest.fixture(scope="module")
def source() -> VllmSource:
    return VllmSource(installed())


@pytest.mark.parametrize("seam", SEAMS)
def test_the_seam_is_there(seam: str, source: VllmSource) -> None:
    assert any(source.has(one) for one in seam.split("|")), f"vLLM at {installed()} has no {seam}"


def imported_from_vllm() -> set[str]:
    """Names that the project imports from vLLM by statement."""
    files = [
        path
        for folder in ("vllm_patching", "example_trainer")
        for path in (ROOT / folder).rglob("*.py")
    ]
    texts = [text for path in files if "from vllm" in (text := path.read_text(encoding="utf-8"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    return {
        f"{node.module}:{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


@pytest.mark.parametrize("seam", sorted(imported_from_vllm()))
def test_what_is_imported_is_there(seam: str, source: VllmSource) -> None:
    if ".vllm_flash_attn." in seam:
        pytest.skip("CUDA builds alone have this library, and who imports it does without")
    module, _, name = seam.partition(":")
    assert (
        source.has(seam) or source.has(f"{module}.{name}:") or source.has(f"{module}:__getattr__")
    )


def test_a_name_that_is_not_there_is_missed(source: VllmSource) -> None:
    assert not source.has(f"{CORE}:EngineCore.no_such_method")
    assert not source.has(f"{CORE}:NoSuchClass")
    assert not source.has("vllm.no_such_module:")
