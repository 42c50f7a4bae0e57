"""vLLM's ranks as weight updaters alone, in threads or in a process of their own, and a trainer's
streams to them.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from example_trainer.models import Geometry
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import (
    Manifest,
    ManifestEntry,
    dtype_name,
    flat_layout,
    local_view,
    source_view,
)
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.rendezvous import Meeting
from vllm_patching.weights.sharding import plan_shards
from vllm_patching.worker.receiving import CohortPlace, UpdaterStatus, WeightUpdater

GEOMETRY = Geometry(
    architecture="Qwen3MoeForCausalLM", vocab_size=97, hidden_size=40, intermediate_size=36, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=12, max_positions=64, rms_norm_eps=1e-6, rope_theta=1e4, qkv_bias=False, o_bias=False,
    mlp_bias=False, qk_norm=True, tie_word_embeddings=False,
    num_experts=5, experts_per_token=2, moe_intermediate_size=12, dense_layers=frozenset({0}),
)  # fmt: skip
"""One layer is dense, and one has experts."""
DENSE = replace(GEOMETRY, architecture="Qwen3ForCausalLM", num_experts=0, dense_layers=frozenset())
BUCKET_BYTES = 3000
"""So that one matrix is several buckets."""
SECONDS = 120.0
"""For whatever must come."""


def manifests_of(tp_size: int, dtype: torch.dtype) -> list[Manifest]:
    """Manifests of a server's ranks."""
    plans = [plan_shards(GEOMETRY, rank, tp_size) for rank in range(tp_size)]
    return [
        Manifest(
            rank, tp_size, tuple(ManifestEntry(spec, dtype_name(dtype), "cpu") for spec in specs)
        )
        for rank, specs in enumerate(plans)
    ]


def at(port: int) -> Meeting:
    """The store of a trainer on this machine."""
    return Meeting("localhost", port, "s3cret")


class Rank:
    """One rank of a server: parameters, and the thread that fills them."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.layout, num_bytes = flat_layout(manifest)
        self.parameters = {
            e.shard.name: torch.zeros(e.shard.shape, dtype=e.torch_dtype) for e in manifest.entries
        }
        live = [(item.name, local_view(item, self.parameters[item.name])) for item in self.layout]
        self.updater = WeightUpdater(
            manifest.tp_rank, self.layout, num_bytes, live, logging.getLogger("test"), BUCKET_BYTES
        )
        self.updater.start()

    def join(
        self, port: int, key: str, members: int, member: int, lanes: int, timeout: float = SECONDS
    ) -> None:
        """Meet a cohort whose transfers may take `timeout` seconds; to meet it, there is always
        time.
        """
        place = CohortPlace(
            at(port),
            key,
            members,
            member,
            lanes,
            self.manifest.tp_rank,
            1,
            Route.GLOO,
            SECONDS,
            timeout,
        )
        self.updater.join_cohort(place)

    def until(self, *phases: str) -> UpdaterStatus:
        """Its status once the thread is in one of these phases."""
        deadline = time.monotonic() + SECONDS
        while self.updater.status.phase not in phases:
            assert time.monotonic() < deadline, f"{self.updater.status} instead of {phases}"
            time.sleep(0.005)
        return self.updater.status

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Report if its parameters are its shard of these, except for padding."""
        return all(
            torch.equal(
                local_view(item, self.parameters[item.name]),
                source_view(item, weights[item.name]).to(item.dtype),
            )
            for item in self.layout
        )

    def checksum_of(self, weights: dict[str, torch.Tensor]) -> str:
        """Return the messages of a trainer that holds these."""
        return weights_checksum(
            (item.name, source_view(item, weights[item.name]).to(item.dtype))
            for item in self.layout
        )


def make_servers(count: int, tp_size: int, dtype: torch.dtype, direct: bool) -> list[list[Rank]]:
    """Servers, each a list of ranks that know where to receive."""
    servers = [[Rank(manifest) for manifest in manifests_of(tp_size, dtype)] for _ in range(count)]
    for server in servers:
        for rank in server:
            rank.updater.aim_at(direct)
            rank.until("idle")
    return servers


def join_all(
    servers: Sequence[Sequence[Rank]],
    port: int,
    key: str,
    lanes: int,
    members: int = 0,
    timeout: float = SECONDS,
) -> None:
    """Have every rank of every server join; the servers are members 0, 1, …"""
    for member, server in enumerate(servers):
        for rank in server:
            rank.join(port, key, members or len(servers), member, lanes, timeout)


def later(work: Callable[[], object]) -> threading.Thread:
    """`work` in a thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def main() -> None:
    """A server of one rank in a process of its own: commands as JSON lines, a line of its phase
    after each change.
    """
    manifest = manifests_of(1, torch.float32)[0]
    rank = Rank(manifest)
    rank.updater.aim_at(False)
    rank.until("idle")
    print("idle", flush=True)

    def report() -> None:
        told = "idle"
        while True:
            if (phase := rank.updater.status.phase) != told:
                told = phase
                print(phase, flush=True)
            time.sleep(0.005)

    later(report)
    for line in sys.stdin:
        command = json.loads(line)
        if "join" in command:
            rank.join(*command["join"])
        else:
            rank.updater.receive(command["receive"])


if __name__ == "__main__":
    main()
