"""However a batch is split, its gradient is that of one large batch, and equals the naive
computation over full logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from example_trainer.algorithm.advantages import group_advantages
from example_trainer.batch.groups import Batch, parse_batch
from example_trainer.batch.packing import PackedBin, empty_bin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.models import Decoder, Geometry
from example_trainer.models.router import RouterLosses
from example_trainer.process import StopRequested, StopSignal
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import BatchGradients, guarded_step, make_objective, warm_up
from tests.example_trainer.parallel.spread_cases import comparable
from tests.geometries import geometry_of

GEOMETRY = geometry_of("Qwen3", 2, 24, 40, 4, 2, 8, 31, tie_word_embeddings=True)
MIXTURE = geometry_of(
    "Qwen3Moe",
    2,
    24,
    40,
    4,
    2,
    8,
    31,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
)


def make_model(seed: int = 0, geometry: Geometry = GEOMETRY) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(geometry, torch.float32)
    for parameter in model.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    return model


def make_groups(
    seed: int, count: int = 3, size: int = 4, prompt_length: int | None = None
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    groups = []
    for _ in range(count):
        group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
        prompt = [rng.randrange(31) for _ in range(prompt_length or rng.randint(2, 6))]
        for _ in range(size):
            response = [rng.randrange(31) for _ in range(rng.randint(1, 15))]
            group["tokens"].append(prompt + response)
            group["masks"].append([-100] * len(prompt) + response)
            group["scores"].append(rng.choice([0.0, 0.5, 1.0]))
            group["inference_logprobs"].append(
                [1.0] * len(prompt) + [-3.4 + rng.gauss(0, 0.3) for _ in response]
            )
        groups.append(group)
    return groups


def config(**options: Any) -> TrainerConfig:
    return TrainerConfig(model_name="-", seq_len=64, **options)


def packed(
    batch: Batch, options: TrainerConfig, tokens: int = 60, share: bool = False
) -> list[list[PackedBin]]:
    """The bins of each minibatch."""
    minibatches = pack_batch(
        batch,
        tokens_per_bin=tokens,
        ranks=1,
        normalisation=options.method.loss_normalisation,
        max_tokens=options.seq_len,
        share_prefixes=share,
        minibatches=options.minibatches,
        temperature=options.temperature,
    )
    return [shares[0] for shares in minibatches]


def gradients_of(
    bins: Sequence[PackedBin],
    options: TrainerConfig,
    reference: Decoder | None = None,
    summed: bool = True,
    geometry: Geometry = GEOMETRY,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    Args:
        summed: let the backward pass add the gradients to sums; else autograd leaves them at the
            parameters.
    """
    model = make_model(geometry=geometry)
    if model.arithmetic.routers is not None:
        coefficients = options.router_balance_coef, options.router_z_coef
        model.arithmetic.routers.losses = RouterLosses(*coefficients)
    optimizer = MasterAdamW(model, lr=0.1)
    assert optimizer.sums is not None
    model.arithmetic.sums = optimizer.sums if summed else None
    gradients = BatchGradients(
        model, optimizer, [bins], options, make_objective(options), StopSignal(), reference
    )
    gradients.accumulate(0)
    gradients.updated()
    return dict(optimizer.gradients()), gradients.row()


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, atol=1e-6, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_however_a_batch_is_packed_its_gradient_is_the_same(normalisation: str) -> None:
    batch = parse_batch(make_groups(1, prompt_length=25), 64, 31)
    options = config(loss_normalisation=normalisation)
    whole, whole_row = gradients_of(packed(batch, options, tokens=1000)[0], options)
    assert len(whole) == len(list(make_model().parameters()))
    for tokens, share, summed in (
        (1, False, True),
        (70, False, False),
        (70, True, True),
        (1000, True, False),
    ):
        bins = packed(batch, options, tokens, share=share)[0]
        assert any(bool((bin.parents >= 0).any()) for bin in bins) == share
        parts, row = gradients_of(
            bins, config(loss_normalisation=normalisation, logprob_chunk=7), summed=summed
        )
        assert_same(parts, whole)
        assert comparable(row) == pytest.approx(comparable(whole_row), rel=1e-4)


@pytest.mark.parametrize(("balance", "z"), [(0.5, 0.0), (0.0, 0.2)])
def test_a_shared_prompt_counts_in_the_losses_of_routers_once_for_each_answer(
    balance: float, z: float
) -> None:
    batch = parse_batch(make_groups(1, prompt_length=25), 64, 31)
    options = config(router_balance_coef=balance, router_z_coef=z)
    whole, whole_row = gradients_of(packed(batch, options, 1000)[0], options, geometry=MIXTURE)
    for tokens in (70, 1000):
        bins = packed(batch, options, tokens, share=True)[0]
        assert any(bin.packing.shared for bin in bins)
        parts, row = gradients_of(bins, options, geometry=MIXTURE)
        assert_same(parts, whole)
        assert comparable(row) == pytest.approx(comparable(whole_row), rel=1e-4)


def test_equal_rollouts_count_in_the_losses_of_routers_once_each() -> None:
    """They share a span that continues none."""
    first, *_ = parse_batch(make_groups(1, prompt_length=40), 64, 31).sequences
    other = parse_batch(make_groups(2), 64, 31).sequences[-1]
    batch = Batch([first, replace(first, order=(0, 1)), replace(other, order=(1, 0))])
    options = config(router_balance_coef=0.5, router_z_coef=0.2)
    whole, whole_row = gradients_of(packed(batch, options)[0], options, geometry=MIXTURE)
    (shared,) = packed(batch, options, 1000, share=True)[0]
    assert (len(shared.counts), len(shared.lengths)) == (3, 2)
    ours, row = gradients_of([shared], options, geometry=MIXTURE)
    assert_same(ours, whole)
    assert comparable(row) == pytest.approx(comparable(whole_row), rel=1e-4)


def test_empty_bins_add_nothing() -> None:
    batch, options = parse_batch(make_groups(1), 64, 31), config()
    bins = packed(batch, options)[0]
    expected, row = gradients_of(bins, options)
    found, same = gradients_of([*bins, empty_bin()], options, summed=False)
    assert_same(found, expected)
    assert comparable(same) == pytest.approx(comparable(row), rel=1e-6)


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_loss_gradient_and_figures_equal_the_naive_computation(kl_coef: float) -> None:
    groups = make_groups(2)
    batch = parse_batch(groups, 64, 31)
    reference = make_model(seed=9)
    options = config(
        kl_coef=kl_coef, clip_eps=0.2, clip_eps_high=0.3, temperature=0.8, correction="none"
    )
    ours, row = gradients_of(packed(batch, options)[0], options, reference if kl_coef else None)
    model = make_model()
    loss = torch.zeros(())
    kl = entropy = clipped = 0.0
    count = sum(token != -100 for group in groups for masks in group["masks"] for token in masks)
    for group in groups:
        for i, advantage in enumerate(group_advantages(group["scores"])):
            tokens = torch.tensor(group["tokens"][i])
            logprobs = (model.logits(tokens[None])[0] / 0.8).log_softmax(-1)
            frozen = (reference.logits(tokens[None])[0].detach() / 0.8).log_softmax(-1)
            for t in range(1, len(tokens)):
                if group["masks"][i][t] == -100:
                    continue
                now, then, base = (
                    logprobs[t - 1, tokens[t]],
                    group["inference_logprobs"][i][t],
                    frozen[t - 1, tokens[t]],
                )
                ratio = (now - then).exp()
                loss = (
                    loss
                    - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage) / count
                )
                loss = loss + kl_coef * ((base - now).exp() - (base - now) - 1) / count
                kl += (ratio - 1 - (now - then)).item() / count
                entropy -= (logprobs[t - 1].exp() * logprobs[t - 1]).sum().item() / count
                stopped = (advantage > 0 and ratio.item() > 1.3) or (
                    advantage < 0 and ratio.item() < 0.8
                )
                clipped += stopped / count
    loss.backward()
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert (row["kl"], row["entropy"], row["clip_fraction"]) == pytest.approx(
        (kl, entropy, clipped), rel=1e-4
    )
    assert 0 < row["clip_fraction"] < 1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            ours[name],
            parameter.grad,
            atol=2e-6,
            rtol=2e-3,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_on_policy_rollouts_have_ratio_one() -> None:
    """Logprobs taken from the model itself: nothing clipped, no divergence, and the loss is minus
    the mean advantage.
    """
    groups = make_groups(3)
    model = make_model()
    for group in groups:
        for i, tokens in enumerate(group["tokens"]):
            with torch.no_grad():
                logprobs = model.logits(torch.tensor([tokens]))[0].log_softmax(-1)
            chosen = [1.0] + [logprobs[t - 1, tokens[t]].item() for t in range(1, len(tokens))]
            group["inference_logprobs"][i] = chosen
    batch = parse_batch(groups, 64, 31)
    _, row = gradients_of(packed(batch, config())[0], config())
    advantages = [a for sequence in batch.sequences for a in sequence["advantages"].tolist()]
    assert row["clip_fraction"] == 0
    assert row["kl"] == pytest.approx(0, abs=1e-9)
    assert row["loss"] == pytest.approx(-sum(advantages) / len(advantages), abs=1e-5)


def test_rewarded_tokens_become_more_likely() -> None:
    """The whole of GRPO on a task that is easy to read: answers of even token ids are rewarded, and
    become the rule.
    """
    model = make_model()
    optimizer = MasterAdamW(model, lr=5e-3)
    model.arithmetic.sums = optimizer.sums
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(25):
        groups = []
        for prompt in ([3, 5], [8, 1]):
            tokens = torch.tensor([prompt] * 16)
            logprobs = torch.full(tokens.shape, 1.0)
            for _ in range(4):
                with torch.no_grad():
                    table = model.logits(tokens)[:, -1].log_softmax(-1)
                chosen = torch.multinomial(table.exp(), 1, generator=generator)
                tokens, logprobs = (
                    torch.cat([tokens, chosen], 1),
                    torch.cat([logprobs, table.gather(1, chosen)], 1),
                )
            scores = (tokens[:, 2:] % 2 == 0).float().mean(1)
            masks = torch.cat([torch.full((16, 2), -100), tokens[:, 2:]], 1)
            wire = {
                "tokens": tokens,
                "masks": masks,
                "scores": scores,
                "inference_logprobs": logprobs,
            }
            groups.append({name: value.tolist() for name, value in wire.items()})
        rewards.append(sum(sum(group["scores"]) for group in groups) / 32)
        minibatches = packed(parse_batch(groups, 64, 31), config())
        row = guarded_step(
            model, optimizer, minibatches, config(), make_objective(config()), StopSignal()
        )
        assert row["kl"] is not None
        assert row["kl"] < 1e-6, "rollouts were sampled from the very policy that is trained"
        optimizer.write_weights()
    assert sum(rewards[:3]) / 3 < 0.65
    assert sum(rewards[-3:]) / 3 > 0.9


def test_stop_is_obeyed_between_bins() -> None:
    class Stopped(StopSignal):
        def check(self) -> None:
            raise StopRequested(15)

    model = make_model()
    with pytest.raises(StopRequested, match="SIGTERM"):
        guarded_step(
            model,
            MasterAdamW(model, lr=0.1),
            [[empty_bin()]],
            config(),
            make_objective(config()),
            Stopped(),
        )


@pytest.mark.parametrize("share", [True, False])
def test_warming_up_leaves_nothing_behind(share: bool) -> None:
    options = config(share_prefixes=share)
    minibatches = packed(parse_batch(make_groups(3), 64, 31), options)
    found = []
    for warm in (False, True):
        model = make_model()
        optimizer = MasterAdamW(model, lr=0.1)
        model.arithmetic.sums = optimizer.sums
        if warm:
            warm_up(model, optimizer, options)
            assert optimizer.gradients() == {}
        guarded_step(model, optimizer, minibatches, options, make_objective(options), StopSignal())
        found.append({name: master.clone() for name, master in optimizer.masters.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
