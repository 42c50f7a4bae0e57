"""Measure the cost of a sampled token outside the GPU, and the rate of a server.

    python bench/generate_cost.py --output DIR                        1 GPU
    python bench/generate_cost.py --output DIR --tiny --device cpu    everything but the figures, without a GPU

Keeps 512 sequences in flight in groups of 8 with prompts of 103 token ids. Lengths have a mean of
450 under a cap of 1,024. They go in turn through /generate with numbers alone, through /generate
with text and tables of logprobs, and through vLLM's own /v1/completions with token ids. Then come
numbers alone from a server whose worker is a process of its own. Last comes the same work by vLLM's
engine without a server. For each: tokens a second, and µs of processor time a token in the front
end and in each process of the engine. Clocks put into the engine core's thread measure its work in
that time (bench/gpu/engine_clock.py). Prints tables and writes generate_cost.json after each way.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__" and sys.path[0] != str(ROOT):
    sys.path[0] = str(ROOT)

import argparse
import asyncio
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import httpx
import psutil

from bench.gpu import engine_clock
from bench.gpu.processes import Answers, BenchError, serve
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.shapes import SHAPES, write_model_folder
from bench.gpu.summary import table
from bench.gpu.vllm_server import READY_SECONDS, VllmServer
from bench.measured import Options, command_line, read_json

GROUP = 8
REQUEST_SECONDS = 300.0
WARM_UP_SECONDS = {"cuda": 1.0, "cpu": 12.0}
"""The time of the first load, in which a token must be counted; a busy CPU takes seconds for one."""
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "numbers": ("/generate", {"return_text": False, "token_logprobs": True}),
    "text and tables": ("/generate", {"logprobs": 0}),
    "vLLM completions": ("/v1/completions", {"logprobs": 0, "return_token_ids": True}),
}
"""Route and fields of each way to ask. The first one is what environments of this project send."""
APART = "numbers, worker apart"
ALONE = "engine alone"
WAYS = (*FORMS, APART, ALONE)


class Lengths:
    """Geometric, so that a sequence is as likely to end at each of its tokens.

    Args:
        mean, cap: tokens.
    """

    def __init__(self, mean: int, cap: int, seed: int) -> None:
        self._random, self._log_stay, self._cap = random.Random(seed), math.log1p(-1 / mean), cap

    def draw(self) -> int:
        return min(self._cap, 1 + int(math.log(1 - self._random.random()) / self._log_stay))


class Load:
    """Groups kept in flight against one route; answers are read and dropped, as another machine
    would take them away.
    """

    def __init__(
        self, server: VllmServer, form: str, args: argparse.Namespace, vocab: int, clock: Path
    ) -> None:
        self._server, self._args, self._vocab, self._clock = server, args, vocab, clock
        self._path, self._fields = FORMS[form]
        self.answers, self.bytes, self.failures = 0, 0, list[str]()

    async def run(self) -> dict[str, Any]:
        """Figures over `--seconds`, after `--ramp` seconds in which the groups fall out of step."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=REQUEST_SECONDS, limits=limits
        ) as client:
            groups = self._args.in_flight // GROUP
            tasks = [asyncio.create_task(self._repeat(client, number)) for number in range(groups)]
            try:
                await asyncio.sleep(self._args.ramp)
                before = await asyncio.to_thread(self._look)
                await asyncio.sleep(self._args.seconds)
                after = await asyncio.to_thread(self._look)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if self.failures or not self.answers:
            raise BenchError(
                f"{self._path}: {len(self.failures)} requests failed: {self.failures[:3]}"
            )
        tokens, seconds = after["tokens"] - before["tokens"], after["at"] - before["at"]
        if tokens <= 0:
            raise BenchError(f"{self._path}: no token came within {seconds:.0f} s; raise --seconds")
        spent = {
            name: (after["processes"][name] - before["processes"][name]) / tokens * 1e6
            for name in after["processes"]
        }
        front_end = spent.pop("front end")
        return {
            "tokens_per_second": tokens / seconds,
            "front_end_us_per_token": front_end,
            "engine_us_per_token": sum(spent.values()),
            "processes_us_per_token": spent,
            "engine_core": engine_clock.spent(before["clock"], after["clock"], tokens),
            "answer_bytes_per_group": self.bytes / self.answers,
            "seconds": seconds,
            "tokens": tokens,
        }

    async def _repeat(self, client: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(number)
        lengths = Lengths(self._args.mean_tokens, self._args.most_tokens, number)
        while True:
            prompt = [draw.randrange(3, self._vocab) for _ in range(self._args.prompt_tokens)]
            body = {
                "n": GROUP,
                "max_tokens": lengths.draw(),
                "temperature": 1.0,
                "ignore_eos": True,
                **self._fields,
            }
            if self._path == "/generate":
                body["prompt"] = {"prompt_token_ids": prompt}
            else:
                body |= {"prompt": prompt, "model": str(self._server.model)}
            try:
                response = await client.post(self._path, json=body)
                response.raise_for_status()
            except httpx.HTTPError as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                return
            self.answers += 1
            self.bytes += len(response.content)

    def _look(self) -> dict[str, Any]:
        """The server's count of tokens, the seconds of processor time that its processes have used
        so far, and its clocks.
        """
        processes = {"front end": _processor_seconds(psutil.Process(self._server.command_pid()))}
        for process in self._server.engine_processes():
            name = _name(process)
            processes[name] = processes.get(name, 0.0) + _processor_seconds(process)
        # A version of vLLM that the clocks do not fit is measured without them.
        clock = read_json(self._clock)
        return {
            "at": time.monotonic(),
            "tokens": self._server.generated_tokens(),
            "processes": processes,
            "clock": clock,
        }


def _name(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    if "EngineCore" in title:
        return "engine core"
    if "Worker" in title:
        return "worker"
    return "others"


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Benchmark(Sitting):
    """The servers, the load and the engine without a server, one after the other."""

    def run(self) -> None:
        """Measure the chosen ways, the ways of one server together."""
        args = self.args
        self.model = write_model_folder(self.work / "model", args.shape)
        asked = (
            "shape",
            "in_flight",
            "mean_tokens",
            "most_tokens",
            "prompt_tokens",
            "seconds",
            "ramp",
        )
        self.describe(work={**{name: getattr(args, name) for name in asked}, "group": GROUP})
        self._server(
            "vllm",
            [form for form in FORMS if form in args.ways],
            ("--distributed-executor-backend", "uni"),
        )
        self._server(
            "vllm-apart",
            [way for way in args.ways if way == APART],
            ("--distributed-executor-backend", "mp"),
        )
        if ALONE in args.ways:
            self.results.measure("ways", ALONE, run=lambda: self._engine_alone(self.model))

    def _server(self, name: str, ways: list[str], flags: tuple[str, ...]) -> None:
        if not ways:
            return
        args, clock = self.args, self.work / f"{name}-clock.json"
        measured = tuple(engine_clock.variables(clock).items())
        server = self.server(
            name,
            self.model,
            max_num_seqs=args.in_flight,
            cache_gib=args.cache_gib,
            flags=flags,
            environment=measured,
        )
        self.ready(server)
        vocab = SHAPES[args.shape]["vocab_size"]
        # Whichever way comes first would pay for what is compiled and captured at the first batches
        # of each size.
        warm_up = argparse.Namespace(**vars(args) | {"seconds": WARM_UP_SECONDS[args.device]})
        asyncio.run(
            Load(server, ways[0].removesuffix(", worker apart"), warm_up, vocab, clock).run()
        )
        for way in ways:
            load = Load(server, way.removesuffix(", worker apart"), args, vocab, clock)
            self.results.measure("ways", way, run=lambda load=load: asyncio.run(load.run()))  # type: ignore[misc]
        server.stop()

    def _engine_alone(self, model: Path) -> dict[str, Any]:
        on_cpu: dict[str, Any] = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
        worker = self.worker(
            "engine", "bench.generate_cost", ["--engine"], **({} if self.on_gpu else on_cpu)
        )
        names = ("shape", "in_flight", "mean_tokens", "most_tokens", "prompt_tokens", "cache_gib")
        asked = {name: getattr(self.args, name) for name in names}
        limit = READY_SECONDS + REQUEST_SECONDS
        found: dict[str, Any] = worker.ask(
            "generate", timeout=limit, model=str(model), on_gpu=self.on_gpu, **asked
        )
        worker.stop()
        return found


WAVES = 6
"""Times the sequences in flight that the engine alone is given."""


def generate_without_server(model: str, on_gpu: bool, **work: Any) -> dict[str, Any]:
    """Have vLLM's engine sample without a server, with as many sequences in flight.

    The figure leaves out the first wave, in which all sequences are young, and the last one, in
    which fewer and fewer run.
    """
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if on_gpu:
        fitting: Mapping[str, Any] = {
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": work["cache_gib"] << 30,
        }
    else:
        fitting = {"dtype": "float32", "enforce_eager": True}
    most = work["prompt_tokens"] + work["most_tokens"]
    in_flight = work["in_flight"]
    engine = LLM(
        model, load_format="dummy", max_num_seqs=in_flight, max_model_len=most, **fitting
    ).llm_engine
    draw, vocab = random.Random(1), SHAPES[work["shape"]]["vocab_size"]
    lengths = Lengths(work["mean_tokens"], work["most_tokens"], 1)
    numbers = {
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    for group in range(WAVES * in_flight // GROUP):
        prompt = {
            "prompt_token_ids": [draw.randrange(3, vocab) for _ in range(work["prompt_tokens"])]
        }
        sampling = SamplingParams(n=GROUP, max_tokens=lengths.draw(), ignore_eos=True, **numbers)
        engine.add_request(str(group), prompt, sampling)
    ended, tokens = 0, 0
    window: list[tuple[float, int]] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            ended += len(output.outputs)
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            if in_flight <= ended <= (WAVES - 1) * in_flight:
                window.append((time.monotonic(), tokens))
    seconds, sampled = (last - first for first, last in zip(window[0], window[-1], strict=True))
    return {"tokens_per_second": sampled / seconds, "seconds": seconds, "tokens": sampled}


def report(data: dict[str, Any]) -> str:
    """Tables of the results' data."""
    ways = data.get("ways", {})
    columns = (
        "tokens_per_second",
        "front_end_us_per_token",
        "engine_us_per_token",
        "answer_bytes_per_group",
    )
    rows = [[name, *(way.get(column) for column in columns)] for name, way in ways.items()]
    tables = [table(["", "tokens/s", "front end µs/token", "engine µs/token", "bytes/group"], rows)]
    for name, way in ways.items():
        clocks = [
            [what, one["us"], one["processor_us"]]
            for what, one in way.get("engine_core", {}).items()
        ]
        if clocks:
            tables.append(table([f"engine core: {name}", "µs/token", "of the processor"], clocks))
    return "\n\n".join(tables)


OPTIONS: Options = {
    "--ways": {"nargs": "+", "choices": WAYS, "default": list(WAYS)},
    "--in-flight": {"type": int, "default": 512, "help": "sequences"},
    "--mean-tokens": {"type": int, "default": 450},
    "--most-tokens": {"type": int, "default": 1024},
    "--prompt-tokens": {"type": int, "default": 103},
    "--cache-gib": {
        "type": int,
        "default": 80,
        "help": "GPU memory for keys and values; 512 sequences need about 30 GiB",
    },
    "--ramp": {
        "type": float,
        "default": 15.0,
        "help": "seconds from the load's start to the measurement's",
    },
    "--seconds": {"type": float, "default": 40.0, "help": "of each measurement"},
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = common_options("generate_cost", "qwen3-1.7b") | OPTIONS
    args = command_line(__doc__, options).parse_args(arguments)
    if args.tiny:
        args.shape, args.in_flight, args.mean_tokens, args.most_tokens, args.prompt_tokens = (
            "tiny",
            64,
            60,
            128,
            16,
        )
        args.ramp, args.seconds = 4.0, 12.0
    return args


def main(arguments: list[str] | None = None) -> int:
    if (sys.argv[1:] if arguments is None else arguments) == ["--engine"]:
        serve(Answers(), {"generate": generate_without_server})
        return 0
    return run_and_report(parse(arguments), Benchmark, report)


if __name__ == "__main__":
    sys.exit(main())
