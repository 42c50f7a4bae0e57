"""The items of a training's memory: against counts by hand, what autograd keeps, and every tensor
that is alive in a step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.live_bytes import Meter
from example_trainer.models.decoder import Decoder
from example_trainer.models.lora.layers import attach_adapters
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.models.ops import choose_operations
from example_trainer.models.packing import Packing
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.memory_plan import (
    Table,
    layer_activation_bytes,
    layer_parameter_count,
    lora_parameter_count,
    parameter_count,
    plan_memory,
)
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.weight_bridge.stream import HANDED_BYTES, Cuts, SendPlan, WeightStream
from tests.example_trainer.training.memory_cases import geometry, qwen_14b, request
from vllm_patching.protocol.manifest import BUCKET_BYTES, Manifest, ManifestEntry
from vllm_patching.protocol.messages import Route
from vllm_patching.weights.families import FAMILIES, PROJECTIONS, Geometry
from vllm_patching.weights.sharding import plan_shards

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def test_parameters_are_those_of_the_model() -> None:
    for made in (geometry(), geometry(tie_word_embeddings=False, qk_norm=False, qkv_bias=True)):
        assert parameter_count(made) == sum(
            p.numel() for p in Decoder(made, torch.float32).parameters()
        )
    assert parameter_count(qwen_14b()) == 14_770_033_664  # as in the model's card: 14.7 B


def test_the_items_of_a_14b_model_are_what_one_expects() -> None:
    n = 14_770_033_664
    items = dict(plan_memory(request(geometry=qwen_14b(), seq_len=2048, reference=True)).items)
    assert items["weights (this trainer's own copy)"] == 2 * n
    assert items["float32 masters"] == items["float32 gradients"] == 4 * n
    assert items["AdamW's two moments"] == 8 * n
    assert items["reference model"] == 2 * n
    single = dict(plan_memory(request(geometry=qwen_14b(), seq_len=2048, single_copy=True)).items)
    assert "weights (this trainer's own copy)" not in single
    eighth = dict(plan_memory(request(geometry=qwen_14b(), seq_len=2048, world_size=8)).items)
    assert eighth["float32 masters"] == 4 * n // 8


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (7, 4), (4, 3), (128, 24)])
def test_the_rank_with_the_most_experts_is_planned(experts: int, ranks: int) -> None:
    """FSDP2 divides whole experts."""
    g = geometry(**MIXTURE | {"num_experts": experts})
    model = Decoder(g, torch.float32, "meta")
    largest = sum(parameter.chunk(ranks)[0].numel() for parameter in model.parameters())
    plan = plan_memory(request(geometry=g, world_size=ranks, reference=True))
    assert plan.lasting["float32 masters"] == 4 * largest
    assert plan.lasting["AdamW's two moments"] == 8 * largest
    assert plan.lasting["reference model"] == 2 * largest
    assert plan.moments["backward of the layers"]["float32 gradients"] == 4 * largest


def test_shared_experts_are_gathered_in_part() -> None:
    g = geometry(**MIXTURE)
    experts = 8 * 3 * 96 * 256
    assert layer_parameter_count(g) - layer_parameter_count(g, 4) == experts - experts // 4
    gathered, shared = (
        plan_memory(request(geometry=g, world_size=4, expert_parallel=count)) for count in (1, 4)
    )
    assert gathered.lasting == shared.lasting, "a rank keeps the same experts in both ways"
    item = "layers, gathered and reduced"
    in_both = [plan.moments["backward of the layers"][item] for plan in (gathered, shared)]
    assert in_both[0] / layer_parameter_count(g) == in_both[1] / layer_parameter_count(g, 4)


def test_adapters_are_small() -> None:
    # q and o: 256 + 256 each; k and v: 256 + 128 each; gate, up and down: 256 + 768 each.
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert lora_parameter_count(geometry(), 16, targets) == 4 * 16 * (2 * 512 + 2 * 384 + 3 * 1024)
    items = dict(plan_memory(request(lora=(16, ("q_proj",)))).items)
    assert items["float32 masters"] == 4 * 4 * 16 * 512


MIXTURE = {
    "architecture": "Qwen3MoeForCausalLM",
    "num_experts": 8,
    "experts_per_token": 3,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "mixture": MIXTURE,
}
ADAPTERS = {
    "every weight": None,
    "adapters": (8, PROJECTIONS),
    "adapters on queries": (8, ("q_proj",)),
}


@pytest.mark.parametrize("table", ["reference", "invariant"])
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_layer_keeps_what_autograd_keeps(
    kind: str, dtype: torch.dtype, adapters: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted over every tensor that is saved for the backward pass, the second of two depths taken
    off. The fast table runs on GPUs alone; it keeps what the invariant one does."""
    lora = ADAPTERS[adapters]
    if table == "invariant" and lora:
        pytest.skip("adapters are not trained deterministically")
    if kind == "mixture":  # counted, whether or not a server has this mode for it
        name = MIXTURE["architecture"]
        monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], no_determinism=""))

    def kept(layers: int) -> int:
        ops = choose_operations(CPU, dtype, deterministic=table == "invariant")
        model = Decoder(geometry(num_layers=layers, **KINDS[kind]), dtype, ops=ops)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        if lora:
            attach_adapters(model, LoraSettings(lora[0], 16.0, 0.0, lora[1]))
        own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), model.rotary)}
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(torch.zeros(64, dtype=torch.int64), Packing([24, 40]))
        assert hidden.shape == (64, 256)
        return sum(
            tensor.untyped_storage().nbytes()
            for pointer, tensor in saved.items()
            if pointer not in own
        )

    measured = (kept(4) - kept(2)) / 2 / 64
    assert layer_activation_bytes(
        geometry(**KINDS[kind]), dtype.itemsize, lora, table, sparse=kind == "mixture"
    ) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("tied", "adapters", "mixture"),
    [(True, False, False), (False, False, False), (False, True, False), (False, False, True)],
    ids=["tied", "untied", "adapters", "mixture"],
)
@pytest.mark.parametrize(
    "checkpointing", [False, True], ids=["activations kept", "gradient checkpointing"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_plan_is_what_is_alive_at_the_worst_moment(
    dtype: torch.dtype, checkpointing: bool, tied: bool, adapters: bool, mixture: bool
) -> None:
    """Every tensor that is alive after each operation of a step is counted. Small, since a
    processor without bfloat16 takes seconds for its products; there are as many tokens for a weight
    as in the other tests."""
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
    }
    if mixture:
        sizes |= MIXTURE | {"moe_intermediate_size": 64, "dense_layers": frozenset([1])}
    shape = geometry(num_layers=3, max_positions=64, tie_word_embeddings=tied, **sizes)
    asked = request(
        geometry=shape, dtype=dtype, tokens_per_microbatch=128, seq_len=64, gradient_checkpointing=checkpointing,
        logprob_chunk=64, lora=(8, PROJECTIONS) if adapters else None,
    )  # fmt: skip
    ids, packing = torch.randint(0, shape.vocab_size, (128,)), Packing([64, 64])
    with Meter(CPU) as meter:
        model = Decoder(shape, dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        model.gradient_checkpointing = checkpointing
        if adapters:
            attach_adapters(model, LoraSettings(8, 16.0, 0.0, PROJECTIONS))
        optimizer = MasterAdamW(model, lr=1e-4)
        model.arithmetic.sums = optimizer.sums
        for microbatch in range(
            3
        ):  # a step of one and one of two, in whose second the moments and the gradients are there
            hidden = model.arithmetic.ops.rows(model(ids, packing), torch.arange(128))
            logprobs, _ = model.chosen_logprobs(hidden, ids, packing, 64)
            loss = -logprobs.mean()
            del hidden, logprobs
            loss.backward()
            if microbatch == 0:
                optimizer.step()
        measured = meter.peak
    assert plan_memory(asked).total == pytest.approx(measured, rel=0.05)


def test_72b_on_32_ranks_on_paper() -> None:
    """Qwen2.5-72B, sharded by FSDP2 over 32 GPUs, broadcast to one vLLM of 8 ranks.

    Each number is worked out by hand.
    """
    hidden, inner, vocab, layers, keys = 8192, 29568, 152064, 80, 1024
    shape = geometry(
        architecture="Qwen2ForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=64, num_kv_heads=8, head_dim=128, max_positions=32768, qk_norm=False, qkv_bias=True,
        tie_word_embeddings=False,
    )  # fmt: skip
    # qkv (64 + 8 + 8 heads of 128, with biases), o, gate and up, down, two norms; embedding, output
    # matrix, last norm.
    layer = (hidden + 2 * keys) * (hidden + 1) + hidden * hidden + 3 * hidden * inner + 2 * hidden
    root = 2 * vocab * hidden + hidden
    total = layers * layer + root
    assert total == parameter_count(shape) == 72_706_203_648

    manifests = [
        Manifest(
            rank,
            8,
            tuple(
                ManifestEntry(spec, "bfloat16", "cuda:0") for spec in plan_shards(shape, rank, 8)
            ),
        )
        for rank in range(8)
    ]
    # A vLLM rank holds an eighth of all matrices and of qkv's biases, and every norm whole.
    norms = (2 * layers + 1) * hidden
    cuts = Cuts.of(manifests)
    assert cuts.num_bytes == 8 * 2 * ((total - norms) // 8 + norms) == 8 * 18_178_859_008

    asked = request(
        geometry=shape, seq_len=4096, tokens_per_microbatch=4096, table="fast", gradient_checkpointing=True, world_size=32,
        layouts=(tuple(manifests),),
    )  # fmt: skip
    plan = plan_memory(asked)
    # Two buckets, and what a rank rounds to bfloat16 for other ranks in one step.
    buffers = plan.lasting["buffers to send from"]
    assert 2 * BUCKET_BYTES < buffers <= 2 * BUCKET_BYTES + HANDED_BYTES
    assert plan.lasting["weights (this trainer's own copy)"] == 0
    assert plan.lasting["float32 masters"] == 4 * total // 32
    loss, layers_back, end, update = plan.moments.values()
    assert plan.greatest == "backward of the layers"
    # The output matrix stays whole through the step, and its gradient waits for its reduction at
    # the end. Two layers are whole: one has float32 gradients, and the gradients of the one before
    # are being added up.
    gathered, sent = "output matrix, gathered", root - vocab * hidden
    assert layers_back[gathered] == loss[gathered] == 2 * sent
    assert layers_back["output matrix's gradient"] == 4 * vocab * hidden
    assert layers_back["layers, gathered and reduced"] == (2 + 2 + 4 + 4) * layer
    # The embedding's and the output matrix's gradients; one of them as it is sent too, and the
    # share of it that comes out.
    assert end["embedding and output matrix, reduced"] == 4 * (root + sent + sent // 32)
    assert update == {}
    # 9.1 masters, 18.2 moments, 0.4 buffers, 9.1 gradients, 2.5 whole matrix, 5.0 head, 10.5
    # layers.
    assert plan.total / 1e9 == pytest.approx(
        9.09 + 18.18 + 0.4 + 9.09 + 2.49 + 4.98 + 10.53 + 12.6, rel=0.01
    )


@pytest.mark.parametrize("vllm_ranks", [1, 2])
@pytest.mark.parametrize("served_dtype", ["float32", "bfloat16"])
def test_planned_buffers_are_those_that_are_made(vllm_ranks: int, served_dtype: str) -> None:
    """Over Gloo a bucket is packed whole; the buffers of two kinds of servers add up."""
    config = json.loads((ROOT / "assets" / "starter_model" / "config.json").read_text())
    served = Geometry.from_config(config)
    manifests = tuple(
        Manifest(
            r,
            vllm_ranks,
            tuple(
                ManifestEntry(s, served_dtype, "cpu") for s in plan_shards(served, r, vllm_ranks)
            ),
        )
        for r in range(vllm_ranks)
    )
    with Meter(CPU) as meter:
        model = Decoder(Geometry.from_config(config), torch.float32)
        before = meter.now
        stream = WeightStream(model, manifests, SendPlan(1, vllm_ranks), Ranks(), CPU, Route.GLOO)
        made = meter.now - before
    asked = request(
        geometry=Geometry.from_config(config), dtype=torch.float32, layouts=(manifests,), packs=True
    )
    planned = plan_memory(asked).lasting["buffers to send from"]
    assert stream.buffer_bytes == planned == pytest.approx(made, rel=0.01)
    assert (
        plan_memory(replace(asked, layouts=(manifests, manifests))).lasting["buffers to send from"]
        == 2 * planned
    )
