"""Commands of this project that tests fork (tests/forked_commands.py), and what is imported before
(tests/fork_server.py).
"""

from __future__ import annotations

COMMANDS = {
    "light": {
        "atroposlib.cli.run_api": "atroposlib.cli.run_api",
        "atroposlib.cli.sft": "atroposlib.cli.sft",
        "atroposlib.cli.view_run": "atroposlib.cli.view_run",
        "environments/arithmetic_server.py": "environments.arithmetic_server",
        "environments/gsm8k_server.py": "environments.gsm8k_server",
        "environments/calculator_server.py": "environments.calculator_server",
        "environments/code_server.py": "environments.code_server",
        "environments/guess_number_server.py": "environments.guess_number_server",
        "environments/judge_server.py": "environments.judge_server",
        "environments/math_server.py": "environments.math_server",
        "environments/reasoning_gym_server.py": "environments.reasoning_gym_server",
        "example_trainer/grpo.py": "example_trainer.grpo",
        "example_trainer/simple_rl.py": "example_trainer.simple_rl",
        "example_trainer.parameter_server": "example_trainer.parameter_server.__main__",
        "example_trainer.reference_worker": "example_trainer.reference_worker",
        "example_trainer.launcher.quickstart": "example_trainer.launcher.quickstart.__main__",
        "studies.starter_model": "studies.starter_model.__main__",
        "tests/atroposlib/envs/faulty_env.py": "tests.atroposlib.envs.faulty_env",
        "tests/atroposlib/envs/public_style_env.py": "tests.atroposlib.envs.public_style_env",
        "tests/inference_standin.py": "tests.inference_standin",
        "tests/e2e/async_roles.py": "tests.e2e.async_roles",
        "tests/e2e/late_trainer.py": "tests.e2e.late_trainer",
        "tests/e2e/sums_in_turns.py": "tests.e2e.sums_in_turns",
        "tests.example_trainer.batch.waiting_trainer": "tests.example_trainer.batch.waiting_trainer",
        "tests.example_trainer.parallel.killed_saving_ranks": "tests.example_trainer.parallel.killed_saving_ranks",
        "tests.example_trainer.training.killed_saver": "tests.example_trainer.training.killed_saver",
        "tests/example_trainer/parallel/launched_rank.py": "tests.example_trainer.parallel.launched_rank",
        "tests.fleet_server": "tests.fleet_server",
        "tests.forked_ranks": "tests.forked_ranks",
        "tests.forked_torchrun": "tests.forked_torchrun",
        "tests/example_trainer/launcher/quickstart/small_plan.py": "tests.example_trainer.launcher.quickstart.small_plan",
        "bench/gpu/length_env.py": "bench.gpu.length_env",
        "bench.gpu.load": "bench.gpu.load",
        "tests.gpu.memory_worker": "tests.gpu.memory_worker",
        "bench.gpu.random_checkpoint": "bench.gpu.random_checkpoint",
        "bench.gpu.speed_worker": "bench.gpu.speed_worker",
        "bench.gpu.trainer": "bench.gpu.trainer",
        "bench.sleeping_roles": "bench.sleeping_roles",
    },
    "vllm": {"example_trainer/vllm_api_server.py": "example_trainer.vllm_api_server"},
}
"""By the process that forks them: modules (`python -m`) and scripts, and what is imported for
each."""
SERVING = (
    "httpcore",
    "encodings.idna",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "anyio.streams.memory",
)
LIGHT = (
    "example_trainer.launcher.quickstart.run", "example_trainer.launcher.quickstart.plot",
    "torch.utils.tensorboard", "numpy.ma",
)  # fmt: skip
VLLM = (
    "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.launchers.cli_args", "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "vllm.model_executor.models.qwen3", "uvloop",
    "vllm.v1.engine.async_llm", "vllm.v1.metrics.prometheus", "vllm.v1.core.sched.scheduler",
    "vllm.transformers_utils.chat_templates", "vllm.utils.cpu_triton_utils", "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.v1.pool.flash_maxsim", "vllm.v1.attention.backends.zentorch_sdpa",
    "vllm.model_executor.layers.quantization.online.base", "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.instrumentator.offline_docs", "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.profile.api_router", "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.entrypoints.generate.structured_decisions.serving", "vllm_patching.server.bridge",
    "vllm_patching.server.routes", "vllm_patching.worker.receiving", "vllm_patching.worker.receiving",
    "model_hosting_container_standards.sagemaker", "uvicorn.protocols.http.httptools_impl", "multiprocessing.popen_fork",
)  # fmt: skip
LATER = {"light": SERVING + LIGHT, "vllm": SERVING + VLLM}
"""Imports of these commands at run time."""
