"""List what changed between two versions of vLLM in the names that this project uses.

    python -m scripts.vllm_seams OLD NEW

OLD and NEW are wheels of vLLM, or folders that hold the package `vllm`. The script reads source and
imports nothing of vLLM, so neither version needs to run on this machine. It ends with status 1 if NEW
lacks a name. docs/new-vllm.md describes what to do with the list.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ENGINE, CORE, CLIENT = "vllm.v1.engine", "vllm.v1.engine.core", "vllm.v1.engine.core_client"
LAYERS = "vllm.model_executor.layers"
SEAMS = (
    # server_app.py; the first that is there is taken
    "vllm.entrypoints.launchers.api_server.entry:run_server|vllm.entrypoints.openai.api_server:run_server",
    "vllm.entrypoints.launchers.api_server.entry:setup_server|vllm.entrypoints.openai.api_server:setup_server",
    "vllm.entrypoints.launchers.api_server.entry:build_app|vllm.entrypoints.openai.api_server:build_app",
    "vllm.entrypoints.launchers.api_server.entry:init_app_state|vllm.entrypoints.openai.api_server:init_app_state",
    *(
        "|".join(
            f"vllm.entrypoints.{package}.cli_args:{name}"
            for package in ("common", "launchers", "openai")
        )
        for name in ("make_arg_parser", "validate_parsed_serve_args")
    ),
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
    f"{CLIENT}:AsyncMPClient.add_request_async",
    f"{ENGINE}.async_llm:AsyncLLM.output_processor",
    f"{ENGINE}.output_processor:OutputProcessor.abort_requests",
    f"{ENGINE}.output_processor:RequestState.parent_req",
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
    "vllm.renderers.base:BaseRenderer.tokenize_prompt_async",
    "vllm.renderers.base:BaseRenderer.default_cmpl_tok_params",
    f"{ENGINE}.input_processor:InputProcessor.process_inputs",
    f"{ENGINE}.input_processor:InputProcessor.assign_request_id",
    "vllm.config.model:ModelConfig.logprobs_mode",
    # the engine core's plugin
    "vllm.utils.network_utils:get_file_store_init_method",
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
        for name in ("list_adapters", "lora_index_to_id", "capacity", "packed_modules_mapping")
    ),
    f"{LAYERS}.layernorm:rms_norm_batch_invariant",
    f"{LAYERS}.linear:linear_batch_invariant",
    f"{LAYERS}.vocab_parallel_embedding:linear_batch_invariant",
    f"{LAYERS}.batch_invariant:softmax_batch_invariant|vllm.model_executor.determinism.batch_invariant:softmax_batch_invariant",
    f"{LAYERS}.batch_invariant:init_batch_invariance|vllm.model_executor.determinism.batch_invariant:init_batch_invariance",
    f"{LAYERS}.batch_invariant:override_envs_for_invariance|vllm.model_executor.determinism.batch_invariant:override_envs_for_invariance",
    f"{LAYERS}.linear:tensor_model_parallel_all_reduce",
    f"{LAYERS}.vocab_parallel_embedding:tensor_model_parallel_all_reduce",
    f"{LAYERS}.fused_moe.runner.moe_runner:tensor_model_parallel_all_reduce",
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size",
    "vllm.distributed.parallel_state:GroupCoordinator.all_gather",
    "vllm.distributed.parallel_state:GroupCoordinator.device_communicator",
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.ca_comm",
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.custom_all_reduce",
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.disabled",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.FLASH_ATTN",
    "vllm.config.attention:AttentionConfig.flash_attn_version",
    "vllm.v1.sample.sampler:Sampler.compute_logprobs",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
    "vllm.config:CompilationConfig",
)
"""`module:name` or `module:Class.name`; of several with | between them one is enough."""


class NoVllm(Exception):
    """A path that is neither a wheel of vLLM nor a folder with the package."""


class VllmSource:
    """The package folder of one version of vLLM, read as syntax trees."""

    def __init__(self, package: Path) -> None:
        self._root = package.parent
        self._trees: dict[str, ast.Module | None] = {}

    def has(self, seam: str) -> bool:
        """Return True if there is such a name; see `find`."""
        return self.find(seam) is not None

    def find(self, seam: str) -> ast.AST | None:
        """Return the tree of `module:attribute`, of `module:Class.attribute` (inherited, or set on
        self, counts too), or of a module `module:`. None if there is no such name.
        """
        module, _, attributes = seam.partition(":")
        tree = self._tree(module)
        if tree is None or not attributes:
            return tree
        first, _, inside = attributes.partition(".")
        if inside:
            return self._members(module, first).get(inside)
        own = _names(tree.body).get(first)
        if own is not None:
            return own
        stars = (node for node in tree.body if isinstance(node, ast.ImportFrom) and _is_star(node))
        everywhere = (self.find(f"{self._absolute(module, star)}:{first}") for star in stars)
        return next(filter(None, everywhere), None)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            place = self._root.joinpath(*module.split("."))
            paths = [
                path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()
            ]
            self._trees[module] = ast.parse(paths[0].read_text(encoding="utf-8")) if paths else None
        return self._trees[module]

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the full name of the module that is imported from."""
        if not node.level:
            return node.module or ""
        is_package = self._root.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + is_package]
        return ".".join([*parents, *filter(None, [node.module])])

    def _members(self, module: str, name: str) -> dict[str, ast.AST]:
        """Return the names in a class and in its base classes, as far as vLLM's own go."""
        tree = self._tree(module)
        if tree is None:
            return {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(
                (alias.asname or alias.name) == name for alias in node.names
            ):
                return self._members(self._absolute(module, node), name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                members: dict[str, ast.AST] = {}
                for base in reversed(node.bases):
                    if isinstance(base, ast.Name):
                        members |= self._members(module, base.id)
                return {**members, **_set_on_self(node), **_names(node.body)}
        return {}


def _names(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    names: dict[str, ast.AST] = {}
    for statement in body:
        for node in _with_branches(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.setdefault(node.name, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(a.asname or a.name).split(".")[0]: node for a in node.names}
            elif isinstance(node, ast.Assign):
                names |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[node.target.id] = node
    return names


def _with_branches(statement: ast.stmt) -> Iterator[ast.AST]:
    yield statement
    if isinstance(statement, ast.If | ast.Try):
        yield from ast.walk(statement)


def _is_star(node: ast.ImportFrom) -> bool:
    return any(alias.name == "*" for alias in node.names)


def _set_on_self(node: ast.AST) -> dict[str, ast.AST]:
    stores = (
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
    )
    return {s.attr: s for s in stores if isinstance(s.value, ast.Name) and s.value.id == "self"}


def compare(old: VllmSource, new: VllmSource) -> list[tuple[str, str]]:
    """Return (state, seam) for each seam: `same`, `changed`, `moved` or `gone`.

    `changed`: the syntax tree of its definition differs; comments and layout do not count.
    `moved`: NEW has it under another of the names that the seam allows.
    """
    return [(_state(seam, old, new), seam) for seam in SEAMS]


def _state(seam: str, old: VllmSource, new: VllmSource) -> str:
    names = seam.split("|")
    before = next((name for name in names if old.has(name)), None)
    after = next((name for name in names if new.has(name)), None)
    if after is None:
        return "gone"
    if before != after:
        return "moved"
    trees = (source.find(after) for source in (old, new))
    texts = {ast.dump(tree) for tree in trees if tree is not None}
    return "same" if len(texts) == 1 else "changed"


def open_source(path: Path, scratch: Path) -> VllmSource:
    """Read a folder, or unpack the Python files of a wheel into `scratch` and read them.

    Raises:
        NoVllm: neither holds vLLM.
    """
    folder = path
    if zipfile.is_zipfile(path):
        folder = scratch / path.name
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
    package = folder / "vllm"
    if not (package / "__init__.py").is_file():
        raise NoVllm(f"{path} holds no vllm/__init__.py; name a wheel, or the folder around vllm/")
    return VllmSource(package)


def main(arguments: list[str] | None = None) -> int:
    """Print the list. Return 1 if a name is gone, 2 if a path holds no vLLM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("old", type=Path, help="wheel or folder of the version in use")
    parser.add_argument("new", type=Path, help="wheel or folder of the next version")
    parser.add_argument("--all", action="store_true", help="list what stayed the same too")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            old, new = (open_source(path, Path(scratch)) for path in (args.old, args.new))
            rows = compare(old, new)
        except (NoVllm, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    for state, seam in rows:
        if args.all or state != "same":
            print(f"{state:8} {seam}")
    states = [state for state, _ in rows]
    print(", ".join(f"{states.count(s)} {s}" for s in ("same", "changed", "moved", "gone")))
    return int("gone" in states)


if __name__ == "__main__":
    sys.exit(main())
