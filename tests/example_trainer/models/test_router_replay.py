"""Routers that take the sampler's choices, from the group's words to the decoder's logits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from example_trainer.batch.groups import ReplayedRouters, Rules, parse_batch
from example_trainer.batch.packing import PackedBin, pack_batch, part_of
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.models.decoder import Decoder
from example_trainer.models.ops import reference
from example_trainer.models.packing import Packing
from example_trainer.models.router_replay import RouterReplay
from example_trainer.process import StopSignal
from example_trainer.training.model import _require_experts
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import BatchGradients, make_objective
from tests.geometries import geometry_of
from vllm_patching.protocol.routed_experts import to_wire

GEOMETRY = geometry_of(
    "Qwen3Moe", 3, 32, 48, 4, 2, 8, 97,
    num_experts=6, moe_intermediate_size=16, mlp_only_layers=[1], norm_topk_prob=True,
)  # fmt: skip
ROUTERS = ReplayedRouters(3, (0, 2), 6, 2)
PROMPT = list(range(1, 31))
"""Long enough to be forwarded once for all its answers."""
ANSWERS = [[40, 41, 42], [43, 44], [45, 46, 47, 48]]


def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(GEOMETRY, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.arithmetic.ops = reference
    return model


def chosen_by(model: Decoder, tokens: list[int]) -> np.ndarray:
    """Return the experts [tokens, layers, 2] that the model itself chooses."""
    experts = np.zeros((len(tokens), 3, 2), dtype=np.int64)

    def note(layer: int, logits: torch.Tensor, packing: Packing, choose: Any) -> Any:
        weights, chosen = choose(logits)
        experts[:, layer] = chosen.numpy()
        return weights, chosen

    model.arithmetic.routing = note
    with torch.no_grad():
        model(torch.tensor(tokens), Packing([len(tokens)]))
    model.arithmetic.routing = None
    return experts


def group(experts: list[np.ndarray]) -> dict[str, Any]:
    """A group whose tokens but the last have these experts."""
    rows = [PROMPT + answer for answer in ANSWERS]
    return {
        "tokens": rows,
        "masks": [[-100] * len(PROMPT) + answer for answer in ANSWERS],
        "scores": [0.0, 1.0, 0.5],
        "routed_experts": [to_wire(one[:-1]) for one in experts],
    }


def figure(replay: RouterReplay) -> dict[str, float | None]:
    """The figure of a step of one update."""
    replay.updated()
    return replay.row(lambda sums: sums, torch.device("cpu"))


def packed(posted: dict[str, Any], shared: bool) -> PackedBin:
    batch = parse_batch([posted], 64, 97, Rules(routers=ROUTERS))
    assert not batch.invalid, batch.invalid
    (((one,),),) = pack_batch(
        batch,
        tokens_per_bin=200,
        ranks=1,
        normalisation="token",
        max_tokens=64,
        share_prefixes=shared,
    )
    return one


@pytest.mark.parametrize("shared", [False, True])
def test_the_samplers_experts_are_used_whatever_the_trainers_are(shared: bool) -> None:
    """With the model's own choices nothing changes; with others it computes with those."""
    model = decoder()
    own = [chosen_by(model, PROMPT + answer) for answer in ANSWERS]
    bin = packed(group(own), shared)
    assert (len(bin.lengths) == 4) == shared
    with torch.no_grad():
        expected = model(bin.tokens, bin.packing)
        replay = model.arithmetic.routing = RouterReplay(GEOMETRY.sparse_layers, 2)
        with replay.counting():
            assert torch.equal(model(bin.tokens, bin.packing), expected)
        assert figure(replay) == {"rerouted_share": 0.0}
        others = packed(group([(one + 1) % 6 for one in own]), shared)
        with replay.counting():
            hidden = model(others.tokens, others.packing)
        assert not torch.allclose(hidden, expected, atol=1e-3)
        share = figure(replay)["rerouted_share"]
        assert share is not None
        assert share > 0.5
        assert figure(replay) == {"rerouted_share": None}


def test_the_router_learns_from_the_probabilities_of_the_replayed_experts() -> None:
    """Also where a layer is computed again in the backward pass, which counts nothing twice."""
    gradients, shares = [], []
    for again in (False, True):
        model = decoder()
        bin = packed(
            group([chosen_by(model, PROMPT + answer)[:, :, ::-1] for answer in ANSWERS]), True
        )
        replay = model.arithmetic.routing = RouterReplay(GEOMETRY.sparse_layers, 2)
        model.gradient_checkpointing = again
        with replay.counting():
            hidden = model(bin.tokens, bin.packing)
        hidden.square().sum().backward()
        shares.append(figure(replay))
        gradients.append(model.get_parameter("model.layers.0.mlp.gate.weight").grad)
    assert gradients[0] is not None
    assert gradients[0].abs().max() > 0
    assert torch.equal(gradients[0], gradients[1])
    assert shares == [{"rerouted_share": 0.0}] * 2, "the order of a token's experts does not count"


def replayed(model: Decoder, bin: PackedBin) -> tuple[torch.Tensor, float]:
    """The hidden states that predict trained tokens, and the share of the rerouted ones."""
    replay = model.arithmetic.routing = RouterReplay(GEOMETRY.sparse_layers, 2)
    with torch.no_grad(), replay.counting():
        hidden = model(bin.tokens, bin.packing)[bin.sources]
    share = figure(replay)["rerouted_share"]
    assert share is not None
    return hidden, share


def test_an_update_that_was_not_taken_has_no_share() -> None:
    """It fails behind its forward passes, as one does whose gradient is not finite."""
    model = decoder()
    experts = [chosen_by(model, PROMPT + answer) for answer in ANSWERS]
    others = packed(group([(one + 1) % 6 for one in experts]), True)
    model.arithmetic.routing = replay = RouterReplay(GEOMETRY.sparse_layers, 2)
    optimizer, options = MasterAdamW(model, lr=0.0), TrainerConfig(model_name="-", seq_len=64)

    def gradients(bin: PackedBin) -> BatchGradients:
        objective = make_objective(options)
        return BatchGradients(model, optimizer, [[bin]], options, objective, StopSignal())

    gradients(others).accumulate(0)
    optimizer.zero_grad()
    second = gradients(packed(group(experts), True))
    second.accumulate(0)
    second.updated()
    assert second.row()["rerouted_share"] == 0
    assert figure(replay) == {"rerouted_share": None}


def test_a_token_counts_once_for_each_sequence_that_has_it() -> None:
    model = decoder()
    experts = [chosen_by(model, PROMPT + answer) for answer in ANSWERS]
    for one in experts:
        one[:20] = (one[:20] + 1) % 6
    shares = [replayed(model, packed(group(experts), shared))[1] for shared in (False, True)]
    assert 0.5 < shares[0] < 0.8, "prompts are most of the tokens, and a part of them is rerouted"
    assert shares[1] == pytest.approx(shares[0])


def test_a_sequence_that_goes_on_from_another_keeps_its_own_experts() -> None:
    """The shorter one has no experts for its last token."""
    model, start = decoder(), PROMPT + PROMPT
    rows = [start, [*start, 40, 41], [*start, 50]]
    generator = np.random.default_rng(0)
    drawn = generator.permuted(np.tile(np.arange(6), (62, 3, 1)), axis=-1)[:, :, :2]
    posted = {
        "tokens": rows,
        "masks": [[-100] * 59 + row[59:] for row in rows],
        "scores": [0.0, 1.0, 0.5],
        "routed_experts": [to_wire(drawn[: len(row) - 1]) for row in rows],
    }
    states = []
    for shared in (False, True):
        bin = packed(posted, shared)
        assert bin.packing.shared == shared
        hidden, _ = replayed(model, bin)
        states.append(dict(zip(bin.targets.tolist(), hidden, strict=True)))
    for token, hidden in states[0].items():
        torch.testing.assert_close(states[1][token], hidden)


def test_a_part_of_a_bin_keeps_its_experts() -> None:
    model = decoder()
    bin = packed(group([chosen_by(model, PROMPT + answer) for answer in ANSWERS]), True)
    part, _ = part_of(bin, [1])
    assert part.packing.routed is part.routed
    assert part.routed.shape == (len(part.tokens), 4)
    places = [bin.tokens.tolist().index(token) for token in part.tokens.tolist()]
    assert torch.equal(part.routed, bin.routed[places])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (None, r"routed_experts\[0\] is missing, and --router-replay needs it"),
        ("nonsense", "does not begin with layers"),
        (np.zeros((31, 3, 2)), r"\[31, 3, 2\], and \[32, 3, 2\] fit a sequence of 33 tokens"),
        (np.zeros((32, 2, 2)), r"\[32, 2, 2\], and \[32, 3, 2\] fit"),
        (np.full((32, 3, 2), 6), "has expert 6, and a layer has 6 experts"),
        (np.full((32, 3, 2), 3), "has an expert twice for one token"),
    ],
)
def test_experts_of_another_sequence_or_model_leave_the_group_out(word: Any, message: str) -> None:
    experts = [np.tile([[1, 2]], (len(PROMPT + answer), 3, 1)) for answer in ANSWERS]
    posted = group(experts)
    posted["routed_experts"][0] = (
        word if word is None or isinstance(word, str) else to_wire(word.astype(np.int64))
    )
    batch = parse_batch([posted], 64, 97, Rules(routers=ROUTERS))
    (reason,) = batch.invalid
    assert re.search(message, reason), reason
    assert not parse_batch([posted], 64, 97, Rules()).invalid, (
        "no one reads them without the option"
    )


@pytest.mark.parametrize(
    ("family", "deterministic", "message"),
    [
        ("Qwen3", False, "Qwen3ForCausalLM.* has none that this trainer computes: leave it out"),
        ("Qwen3Moe", True, "cannot be combined with --deterministic, in which both sides choose"),
    ],
)
def test_what_has_nothing_to_replay_is_refused(
    family: str, deterministic: bool, message: str
) -> None:
    geometry = geometry_of(family, 1, 32, 48, 4, 2, 8, 97)
    config = TrainerConfig(
        model_name="any",
        router_replay=True,
        deterministic=deterministic,
        weight_bridge_mode="shared_vllm",
    )
    with pytest.raises(ConfigError, match=f"^--router-replay .*{message}"):
        _require_experts(config, geometry)
