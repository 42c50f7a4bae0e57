"""The trainer's side of a measurement: a random model of a given shape behind the project's real
bridge classes.

Run as a process of its own (`trainer_arguments` makes the command line), which takes commands line
by line: load, connect, sync, check and so on. Two sets of weights are made beforehand and taken in
turn, so that making new weights costs one copy.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import torch
from torch import Tensor

from bench.gpu.processes import Answers, free_port, serve
from bench.gpu.shapes import SHAPES
from bench.gpu.synthetic import dtype_on
from bench.gpu.vllm_server import NUMBERS
from example_trainer.models.decoder import Decoder
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from vllm_patching.weights.families import Geometry

PROMPT_TOKENS = 40
SAMPLES, SAMPLE_TOKENS = 8, 32
FIRST_STEP_SECONDS = 30.0
"""Limit of the wait, while requests are in flight, until the server knows when its engine went on
after an update.
"""


def trainer_arguments(shape: str, port: int, device: str, timeout: float) -> list[str]:
    """The command line of a trainer, after the module's name."""
    return ["--shape", shape, "--port", str(port), "--device", device, "--timeout", str(timeout)]


def scaled(name: str, noise: Tensor, std: float) -> Tensor:
    """Scale noise in place to the weights of a parameter: weights of a norm are about 1."""
    if "norm" in name:
        return noise.mul_(0.05).add_(1.0)
    return noise.mul_(std)


class BenchTrainer:
    """The commands of the parent; every public method is one and returns something that JSON can
    hold.
    """

    decoder: Callable[[Geometry, torch.dtype, torch.device], Decoder] = Decoder

    def __init__(self, shape: str, port: int, device: str, timeout: float) -> None:
        """
        Args:
            shape: a key of SHAPES.
            port: the server's, on this machine.
            device: `cuda` or `cpu`.
            timeout: seconds for each phase of an update.
        """
        self.shape, self.port, self.timeout = shape, port, timeout
        self.device = torch.device(device)
        self.url = f"http://localhost:{port}"
        self.dtype = dtype_on(self.device)
        self.model: Decoder | None = None
        self.sets: list[dict[str, Tensor]] = []
        self.spare = self.drawn = False
        self.seed = self.rank = 0
        self.served_set = 0
        self.version = -1
        self.last_checksum = ""
        self.startup_timeout = timeout
        self.bridge: WeightBridge | None = None
        self.optimizer: Any = None
        self.answers: Answers | None = None
        self._head_norm = torch.empty(0)

    def load(
        self, seed: int = 0, optimizer: bool = False, spare: bool = False, drawn: bool = False
    ) -> dict[str, Any]:
        """Make the model and two sets of weights.

        Args:
            seed: of the weights.
            optimizer: also make float32 masters and moments (of the first set).
            spare: keep only the set that is not in the model beside it, and exchange the two at
                each update: for large models. Not for a single copy, whose parameters are given
                other memory.
            drawn: keep neither set, and draw an update's weights again where they are read: for
                models that do not fit twice. A write then takes as long as the drawing.
        """
        before = self._memory_used()
        self.model = self.decoder(Geometry.from_config(SHAPES[self.shape]), self.dtype, self.device)
        self._make_sets(seed, drawn)
        self.write(0)
        self.spare = spare and not drawn
        if self.spare:
            self.sets[0] = {}
        if optimizer:
            from example_trainer.training.optimizer import MasterAdamW

            self.optimizer = MasterAdamW(self.model, lr=1e-3)
        weights_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {
            "parameters": sum(1 for _ in self.model.parameters()),
            "model_bytes": weights_bytes,
            "gpu_bytes_taken": self._memory_used() - before,
        }

    def write(self, which: int) -> None:
        """Copy or draw a set into the model's parameters, wherever their memory is."""
        assert self.model is not None
        if self.drawn:
            self._draw(which, self._local())
            self.served_set = which
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the drawing counts as the write, not as what follows it
            return
        if self.spare:
            if which != self.served_set:
                self._exchange(self.sets[which])
                self.sets[1 - which], self.sets[which] = self.sets[which], {}
                self.served_set = which
            return
        with torch.no_grad():
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            torch._foreach_copy_(list(parameters), [self.sets[which][name] for name in names])
        self.served_set = which

    def connect(self, kind: str, ports: Sequence[int] = (), **options: Any) -> dict[str, Any]:
        """Join the server by `broadcast` or `single_copy`, and send the first weights.

        Args:
            kind: which bridge.
            ports: of several servers on this machine, by broadcast; by default the port from the
                command line.
            options: keyword arguments of its class, such as transfer; one that the class does not
                know is an error.

        Returns:
            params_mapped, params_total, seconds, and how the GPU's memory changed (bytes; 0 without
            a GPU).
        """
        assert self.model is not None
        bridge_class: Any = {"broadcast": BroadcastBridge, "single_copy": SingleCopyBridge}[kind]
        known = inspect.signature(bridge_class).parameters
        unknown = sorted(options.keys() - known.keys())
        if unknown:
            raise TypeError(f"{bridge_class.__name__} has no option {', '.join(unknown)}")
        self.close()
        before = self._memory_used()
        started = time.monotonic()
        # Another port each time: the store of a bridge that has just been left may still hold its
        # own.
        os.environ["MASTER_PORT"] = str(self._master_port())
        wait = self.startup_timeout
        servers = [
            BridgeServer("localhost", port, self.timeout, startup_timeout=wait)
            for port in ports or [self.port]
        ]
        self.bridge = bridge_class(servers if ports else servers[0], **options)
        if self.bridge.serving_dtype() is not self.dtype:
            raise RuntimeError(
                f"the server holds {self.bridge.serving_dtype()}, this trainer {self.dtype}"
            )
        self.bridge.connect(self.model)
        seconds = time.monotonic() - started
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        first = self._update(lambda: self.write(0))
        return {
            "params_mapped": self.bridge.params_mapped,
            "params_total": self.bridge.params_total,
            "seconds": seconds,
            "gpu_bytes_taken": self._memory_used() - before,
            "first_update": first,
        }

    def sync(self, count: int, interval: float = 0.0, loaded: bool = False) -> list[dict[str, Any]]:
        """Update the server `count` times, beginning one every `interval` seconds or as soon as the
        one before has ended.

        Args:
            loaded: requests are in flight; wait after each update until the server knows when its
                engine went on.

        Returns:
            for each: version, start and end (monotonic clock), seconds by phase, bytes_moved,
            first_byte_to_verified. Also write (seconds until the last weight was written, by the
            GPU's clock) and the server's own seconds.
        """
        rows = []
        begin = time.monotonic()
        for index in range(count):
            time.sleep(max(0.0, begin + index * interval - time.monotonic()))
            rows.append(self._next_update(index, loaded))
        return rows

    def sync_with_optimizer(self, count: int, loaded: bool = False) -> list[dict[str, Any]]:
        """As sync, with a real forward, backward and optimizer step before each; its masters are
        rounded in the pause.
        """
        assert self.model is not None
        rows = []
        for index in range(count):
            started = time.monotonic()
            tokens = torch.randint(3, self.model.geometry.vocab_size, (2, 64), device=self.device)
            logprobs = self.model.logits(tokens[:, :-1]).float().log_softmax(-1)
            loss = -logprobs.gather(-1, tokens[:, 1:, None]).mean()
            loss.backward()
            middle = time.monotonic()
            report = self.optimizer.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            stepped = time.monotonic() - middle
            row = self._update(self.optimizer.write_weights, self.optimizer.masters, loaded)
            rows.append(
                {
                    **row,
                    "optimizer_step": stepped,
                    "forward_backward": middle - started,
                    "loss": float(loss.detach()),
                }
            )
            del loss, logprobs, report, index
        return rows

    def check(self, seed: int = 0, port: int = 0) -> dict[str, Any]:
        """Do the logprobs of freshly sampled tokens belong to the weights sent last, and not to the
        ones before?

        Args:
            port: of the server to check, by default the port from the command line.
        """
        prompt, url = self._prompt(seed), f"http://localhost:{port or self.port}"
        answer, state = self._asked(
            lambda: (self._sample(prompt, seed, url), self._get("/bridge/state", url))
        )
        return {
            "version": self.version,
            "served": state["weight_version"],
            **self._compared(prompt, answer),
            "checksums_equal": self._checksums_equal(state["checksums"], url),
        }

    def is_served_by(self, port: int) -> bool:
        """Report if a vLLM server on this machine holds this model's weights, by the checksums of
        its ranks.
        """
        url = f"http://localhost:{port}"
        return self._checksums_equal(self._get("/bridge/state", url)["checksums"], url)

    def flatten_head(self, undo: bool = False) -> dict[str, Any]:
        """Write zeros into the last norm, without an update of the server (or put back what was
        there): a single copy shows it.
        """
        assert self.model is not None
        weight = self.model.model.norm.weight.detach()
        if undo:
            weight.copy_(self._head_norm)
        else:
            self._head_norm = weight.clone()
            weight.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {"vocab": self.model.geometry.vocab_size}

    def memory(self) -> dict[str, int]:
        """Bytes: in use on the GPU by everyone, and reserved by this process's allocator (0 without
        a GPU).
        """
        reserved = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return {"gpu_bytes_used": self._memory_used(), "reserved_by_trainer": reserved}

    def close(self) -> dict[str, Any]:
        """Leave the server."""
        if self.bridge is not None:
            self.bridge.close()
            self.bridge = None
        return {}

    def commands(self) -> dict[str, Callable[..., Any]]:
        """The public methods by name."""
        public = (
            self.load,
            self.connect,
            self.sync,
            self.sync_with_optimizer,
            self.check,
            self.is_served_by,
        )
        return {
            method.__name__: method
            for method in (*public, self.flatten_head, self.memory, self.close)
        }

    def _next_update(self, index: int, loaded: bool) -> dict[str, Any]:
        return self._update(
            lambda: self.write(1 - self.served_set), self.sets[1 - self.served_set], loaded
        )

    def _update(
        self,
        write: Callable[[], None],
        masters: dict[str, Tensor] | None = None,
        loaded: bool = False,
    ) -> dict[str, Any]:
        assert self.bridge is not None
        version = self.version + 1
        # A single copy does not wait for its writes before it asks for their check.
        clock = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if self.device.type == "cuda"
            else []
        )

        def timed_write() -> None:
            if clock:
                clock[0].record()
            write()
            if clock:
                clock[1].record()

        start = time.monotonic()
        report = self.bridge.sync(version, timed_write, masters or None)
        end = time.monotonic()
        if clock:
            clock[1].synchronize()
        self.version, self.last_checksum = version, report.checksum
        return {
            "version": version,
            "start": start,
            "end": end,
            "seconds": report.seconds,
            "write": clock[0].elapsed_time(clock[1]) / 1e3
            if clock
            else report.seconds.get("write", 0.0),
            "bytes_moved": report.bytes_moved,
            "first_byte_to_verified": report.first_byte_to_verified,
            "server": {**report.server_seconds, **(self._stalled() if loaded else {})},
        }

    def _stalled(self) -> dict[str, float]:
        """`stalled` of the last update, once the server has asked its workers; empty if they took
        no step in time.
        """
        deadline = time.monotonic() + FIRST_STEP_SECONDS
        while time.monotonic() < deadline:
            seconds = self._get("/bridge/state")["last_update"]
            if "stalled" in seconds:
                return {"stalled": seconds["stalled"]}
            time.sleep(0.05)
        return {}

    def _prompt(self, seed: int) -> list[int]:
        assert self.model is not None
        return [
            (1000 + 7 * seed + i) % self.model.geometry.vocab_size for i in range(PROMPT_TOKENS)
        ]

    def _sample(self, prompt: list[int], seed: int, url: str) -> Any:
        """A server's answer on a prompt, its logprobs as numbers."""
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "n": SAMPLES,
            "max_tokens": SAMPLE_TOKENS,
            "seed": seed,
            **NUMBERS,
        }
        return httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()

    def _get(self, path: str, url: str = "") -> Any:
        return httpx.get(f"{url or self.url}{path}", timeout=30).raise_for_status().json()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Ask the server, on the rank that speaks with it."""
        return ask()

    def _compared(self, prompt: list[int], answer: dict[str, Any]) -> dict[str, Any]:
        """Compare an answer's logprobs with the logprobs under the weights sent last, and under the
        weights before.
        """
        sampled, served = (
            torch.tensor(answer[key], device=self.device) for key in ("token_ids", "token_logprobs")
        )
        to_new, present = self._difference(prompt, sampled, served), self.served_set
        self.write(1 - present)
        to_old = self._difference(prompt, sampled, served)
        self.write(present)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # they may be the server's own weights
        return {
            "mean_logprob_difference_to_new_weights": to_new,
            "mean_logprob_difference_to_old_weights": to_old,
            "new_not_old": to_new < 0.6 and to_old > 4 * to_new,
        }

    def _checksums_equal(self, served: list[str], url: str = "") -> bool:
        """Report if each of the server's ranks holds the right weights, as computed from this
        side's tensors.
        """
        from vllm_patching.protocol.checksum import weights_checksum
        from vllm_patching.protocol.manifest import Manifest, flat_layout, source_view

        assert self.model is not None
        parameters = dict(self.model.named_parameters())
        layouts = [
            flat_layout(Manifest.from_json(rank))[0]
            for rank in self._get("/bridge/info", url)["ranks"]
        ]
        return served == [
            weights_checksum((i.name, source_view(i, parameters[i.name]).detach()) for i in layout)
            for layout in layouts
        ]

    def _master_port(self) -> int:
        return free_port()

    def _local(self) -> dict[str, Tensor]:
        """This process's rows of each parameter."""
        assert self.model is not None
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _held_by_all(self, name: str) -> bool:
        """Report if all ranks hold a parameter, or a part of it, and must draw it alike."""
        return False

    def _make_sets(self, seed: int, drawn: bool) -> None:
        self.seed, self.drawn = seed, drawn
        self.sets = [{}, {}]
        for which in () if drawn else (0, 1):
            self.sets[which] = {
                name: torch.empty(rows.shape, device=self.device, dtype=self.dtype)
                for name, rows in self._local().items()
            }
            self._draw(which, self.sets[which])

    @torch.no_grad()
    def _draw(self, which: int, into: dict[str, Tensor]) -> None:
        """Fill tensors with the values of a set, which are the same each time."""
        assert self.model is not None
        # Logits of a spread at which another set of weights shows at once.
        std = 1.8 / self.model.geometry.hidden_size**0.5
        seed = 1000 * (2 * self.seed + which)
        own, shared = (
            torch.Generator(device=self.device).manual_seed(number)
            for number in (seed + self.rank, seed + 999)
        )
        for name, rows in into.items():
            generator = own
            if self._held_by_all(name):
                generator = shared
            scaled(name, rows.normal_(generator=generator), std)

    def _exchange(self, weights: dict[str, Tensor]) -> None:
        assert self.model is not None
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                held = parameter.detach().clone()
                parameter.copy_(weights[name])
                weights[name].copy_(held)

    def _difference(self, prompt: list[int], sampled: Tensor, served: Tensor) -> float:
        """Mean |served logprob - logprob of the forward pass|; both tensors [samples, tokens]."""
        rows = []
        with torch.no_grad():
            for tokens in sampled:
                ids = torch.cat([torch.tensor(prompt, device=self.device), tokens])[None]
                logprobs = self._logits(ids)[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                rows.append(logprobs.gather(-1, tokens[:, None])[:, 0])
        return float((served - torch.stack(rows)).abs().mean())

    def _logits(self, ids: Tensor) -> Tensor:
        """[batch, length, vocab] of token ids [batch, length]."""
        assert self.model is not None
        return self.model.logits(ids)

    def _memory_used(self) -> int:
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line that trainer_arguments makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--timeout", type=float, required=True)
    return parser.parse_args(arguments)


def set_up(args: argparse.Namespace) -> None:
    """Logging to stderr, one thread on a CPU, and a CUDA context."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if args.device == "cuda":
        torch.zeros(1, device="cuda")
    else:
        torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))


def main(
    kind: type[BenchTrainer] = BenchTrainer, prepare: Callable[[], object] = lambda: None
) -> None:
    """A trainer of this kind, in a process of its own.

    `prepare`: called before the device is touched.
    """
    answers = Answers()
    args = parse()
    prepare()
    set_up(args)
    trainer = kind(args.shape, args.port, args.device, args.timeout)
    trainer.answers = answers
    serve(answers, trainer.commands())


if __name__ == "__main__":
    main()
