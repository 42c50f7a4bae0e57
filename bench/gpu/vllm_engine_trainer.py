"""A trainer that uses vLLM's own NCCL weight-transfer engine, to compare with. Needs GPUs and
vLLM 0.26: the engine of 0.33 has another trainer's side. `scripts/lock.sh --vllm 0.26.0 FILE` makes
a list to install.

The server is started with VLLM_SERVER_DEV_MODE=1 and `--weight-transfer-config '{"backend":
"nccl"}'`. One update is: the write of the new weights, /pause?mode=keep, /start_weight_update, the
packed broadcast beside /update_weights, /finish_weight_update, /resume. All requests go over one
kept connection to each server, to several at the same time. It is timed from the write to the last
answer, as ours is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import httpx
import torch

from bench.gpu.processes import free_port
from bench.gpu.trainer import BenchTrainer, main
from vllm_patching.weights.families import parameters

NCCL_ENGINE = "vllm.distributed.weight_transfer.nccl_engine"


class EngineTrainer(BenchTrainer):
    """The same model and weights, sent in the checkpoint's names and shapes."""

    def __init__(self, shape: str, port: int, device: str, timeout: float) -> None:
        super().__init__(shape, port, device, timeout)
        self._group: Any = None
        self._clients = [httpx.Client(base_url=self.url, timeout=timeout)]

    def join(self, others: Sequence[int] = ()) -> dict[str, Any]:
        """Meet the server's workers in an NCCL group, this process as rank 0.

        Args:
            others: ports of more servers on this machine, whose workers come into the same group.
        """
        engine = import_module(NCCL_ENGINE)
        if not hasattr(engine.NCCLWeightTransferEngine, "trainer_init"):
            raise RuntimeError(
                "the comparison with vLLM's own engine needs vLLM 0.26: install the list of "
                "`scripts/lock.sh --vllm 0.26.0 FILE`, or leave out the part `engine`"
            )
        self._clients += [
            httpx.Client(base_url=f"http://localhost:{port}", timeout=self.timeout)
            for port in others
        ]
        sizes = [
            int(client.get("/get_world_size").raise_for_status().json()["world_size"])
            for client in self._clients
        ]
        world = 1 + sum(sizes)
        meeting = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world}
        offsets = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        calls = [
            self._in_background(
                client,
                "/init_weight_transfer_engine",
                json={"init_info": {**meeting, "rank_offset": offset}},
            )
            for client, offset in zip(self._clients, offsets, strict=True)
        ]
        self._group = engine.NCCLWeightTransferEngine.trainer_init(meeting)
        for call in calls:
            call()
        self.served_set = 0
        return {"world_size": world, "first_update": self._engine_update(0)}

    def _next_update(self, index: int, loaded: bool) -> dict[str, Any]:
        return self._engine_update(1 - self.served_set)

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "join": self.join, "check": self.check_logprobs}

    def check_logprobs(self, seed: int = 0, port: int = 0) -> dict[str, Any]:
        """BenchTrainer.check without the checksums, which vLLM does not have."""
        prompt = self._prompt(seed)
        return self._compared(
            prompt, self._sample(prompt, seed, f"http://localhost:{port or self.port}")
        )

    def checkpoint_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor of a Hugging Face checkpoint, as views on the model's parameters."""
        assert self.model is not None
        own = dict(self.model.named_parameters())
        return [
            (part.name, own[name].data[part.start : part.stop])
            for name, planned in parameters(self.model.geometry).items()
            for part in planned.tensors
        ]

    def _engine_update(self, which: int) -> dict[str, Any]:
        engine = import_module(NCCL_ENGINE)
        seconds: dict[str, float] = {}
        start = last = time.monotonic()

        def lap(name: str) -> None:
            nonlocal last
            now = time.monotonic()
            seconds[name], last = now - last, now

        self.write(which)
        torch.cuda.synchronize()
        lap("write")
        tensors = self.checkpoint_tensors()
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
            "shapes": [list(t.shape) for _, t in tensors],
            "packed": True,
        }
        lap("names")
        self._ask_all("/pause", params={"mode": "keep", "clear_cache": "true"})()
        lap("pause")
        paused = last
        self._ask_all("/start_weight_update")()
        lap("start")
        call = self._ask_all("/update_weights", json={"update_info": info})
        arguments = engine.NCCLTrainerSendWeightsArgs(group=self._group, packed=True)
        engine.NCCLWeightTransferEngine.trainer_send_weights(iter(tensors), arguments)
        torch.cuda.synchronize()
        call()
        lap("transfer")
        self._ask_all("/finish_weight_update")()
        lap("finish")
        self._ask_all("/resume")()
        lap("resume")
        return {
            "start": start,
            "end": last,
            "seconds": seconds,
            "bytes_moved": sum(t.numel() * t.element_size() for _, t in tensors),
            "first_byte_to_verified": seconds["transfer"] + seconds["finish"],
            "server": {"halted": last - paused},
        }

    def _ask_all(self, path: str, **request: Any) -> Callable[[], None]:
        """POST to all servers at the same time; the function returned waits for all and raises what
        one raised.
        """
        calls = [self._in_background(client, path, **request) for client in self._clients]

        def wait() -> None:
            for call in calls:
                call()

        return wait

    def _in_background(self, client: httpx.Client, path: str, **request: Any) -> Callable[[], None]:
        """POST in a thread; the function returned waits for it and raises what it raised."""
        outcome: list[BaseException | None] = []

        def call() -> None:
            try:
                client.post(path, **request).raise_for_status()
                outcome.append(None)
            except Exception as error:  # noqa: BLE001 - raised again where it is waited for
                outcome.append(error)

        thread = threading.Thread(target=call, name=path, daemon=True)
        thread.start()

        def wait() -> None:
            thread.join(self.timeout + 10)
            if not outcome:
                raise TimeoutError(f"{path} did not answer within {self.timeout:g} s")
            if outcome[0] is not None:
                raise outcome[0]

        return wait


if __name__ == "__main__":
    main(
        EngineTrainer, lambda: import_module(NCCL_ENGINE)
    )  # which takes many seconds, during which the server starts
