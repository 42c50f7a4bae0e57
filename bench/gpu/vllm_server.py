"""A vLLM server of a given shape with random weights: started, waited for, asked, stopped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.gpu.processes import BenchError, Child, free_port
from example_trainer.launcher import roles

NUMBERS = {"ignore_eos": True, "return_text": False, "token_logprobs": True}
"""Fields of a request to /generate without text and tables of logprobs: the form that this
project's environments use.
"""
READY_SECONDS = 240.0
"""The first start on a fresh machine takes 100 to 130 s."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        gpus: for CUDA_VISIBLE_DEVICES; empty on a machine without one.
        tp: tensor-parallel degree.
        shared: our weight bridge is on; without it the workers run vLLM's code alone.
        eager: without compilation and CUDA graphs.
        cache_gib: exact size of the cache of keys and values. A size measured by vLLM at its start
            would depend on other users of the GPU at that moment.
        bridge_timeout: seconds for each phase of an update.
        load_format: `dummy` for random weights, `auto` for those in the model's folder.
        flags, environment: whatever else.
    """

    gpus: str
    tp: int = 1
    shared: bool = True
    eager: bool = False
    cache_gib: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 256
    bridge_timeout: float = 60.0
    load_format: str = "dummy"
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class VllmServer(Child):
    """A running vllm_api_server.py."""

    def __init__(
        self,
        name: str,
        model: Path,
        output: Path,
        options: ServerOptions,
        port: int | None = None,
        logs: Path | None = None,
    ) -> None:
        """
        Args:
            name: for messages and the log's name.
            model: folder with config.json and tokenizer.
            output: where the log goes.
            port: an earlier server's, to take its place; by default a free one.
            logs: where server and trainer leave each other files; by default a folder beside the
                model.
        """
        self.port = port or free_port()
        self.url = f"http://localhost:{self.port}"
        self.options = options
        self.model = model
        folder = logs or model.parent / f"logdir-{name.replace(' ', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        on_gpu = bool(options.gpus)
        # Benchmarks come without a key, which the machine's environment may hold.
        environment = {"VLLM_API_KEY": "", "VLLM_NO_USAGE_STATS": "1", "LOGDIR": str(folder)}
        environment["VLLM_ENABLE_SHARED_WEIGHTS"] = "1" if options.shared else "0"
        memory: dict[str, roles.Value] = {}
        if on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = options.gpus
            # vLLM refuses to start unless so much is free; the size of the cache follows from the
            # other flag.
            memory["gpu_memory_utilization"] = 0.1
            memory["kv_cache_memory_bytes"] = options.cache_gib << 30
        else:
            # 32,768 tokens: a worker writes zeros into all of its cache.
            memory["num_gpu_blocks_override"] = 256
            environment["OMP_NUM_THREADS"] = "1"
        if options.tp > 1:
            memory["tensor_parallel_size"] = options.tp
            if on_gpu:
                environment["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        server_flags = roles.vllm_flags(
            "127.0.0.1",
            on_gpu,
            None if on_gpu else "auto",
            options.eager,
            load_format=options.load_format,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            bridge_timeout=options.bridge_timeout,
            **memory,
        )
        super().__init__(
            name,
            roles.vllm_server(model, self.port, [*server_flags, *options.flags]),
            output / f"{name.replace(' ', '-')}.log",
            environment | dict(options.environment),
        )

    def ready(self) -> bool:
        """Report if it samples a token now. Raises BenchError if it has ended."""
        if self.poll() is not None:
            raise self.ended()
        try:
            return httpx.get(f"{self.url}/health_generate", timeout=40).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """GET a JSON answer."""
        return httpx.get(f"{self.url}{path}", timeout=timeout).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> Any:
        """POST a JSON body for a JSON answer."""
        response = httpx.post(f"{self.url}{path}", json=body, timeout=timeout)
        if response.status_code != 200:
            raise BenchError(
                f"{self.name} answered {path} with {response.status_code}: {response.text[:400]}"
            )
        return response.json()

    def state(self) -> dict[str, Any]:
        """GET /bridge/state."""
        answer: dict[str, Any] = self.get("/bridge/state")
        return answer

    def health(self) -> int:
        """Return the status of GET /health; 0 without an answer."""
        try:
            return httpx.get(f"{self.url}/health", timeout=30).status_code
        except httpx.TransportError:
            return 0

    def greedy(self, prompt: list[int], max_tokens: int = 8) -> tuple[list[int], list[float]]:
        """Token ids and logprobs of a completion without randomness."""
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "max_tokens": max_tokens,
            "temperature": 0.0,
            **NUMBERS,
        }
        answer = self.post("/generate", body)
        return answer["token_ids"][0], answer["token_logprobs"][0]

    def generated_tokens(self) -> float:
        """Return the number of tokens that it has sampled since its start, by its own counter."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
        if not found:
            raise BenchError(f"{self.name} has no counter vllm:generation_tokens_total in /metrics")
        return sum(map(float, found))

    def engine_processes(self) -> list[psutil.Process]:
        """The engine's core and, with several ranks, its workers; the largest first."""
        found = []
        for process in self.descendants():
            try:
                line = " ".join(process.cmdline())
                if "resource_tracker" not in line:
                    found.append((process.memory_info().rss, process))
            except psutil.NoSuchProcess:
                continue
        return [process for _, process in sorted(found, key=lambda pair: -pair[0])]

    def worker_process(self, tp_rank: int) -> psutil.Process:
        """The process that holds a rank's weights.

        Raises BenchError if it cannot be distinguished from the others.
        """
        processes = self.engine_processes()
        if self.options.tp == 1:
            cores = [p for p in processes if "EngineCore" in _title(p)] or processes[:1]
        else:
            cores = [
                p for p in processes if re.search(rf"Worker(_PP\d+)?_TP{tp_rank}\b", _title(p))
            ]
        if len(cores) != 1:
            titles = [_title(p)[:80] for p in processes]
            raise BenchError(
                f"{self.name}: {len(cores)} processes look like rank {tp_rank}'s worker among {titles}"
            )
        return cores[0]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
