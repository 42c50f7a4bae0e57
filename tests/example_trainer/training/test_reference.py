"""The reference: its values in a step, and the values of a reference worker."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from example_trainer.batch.client import registration
from example_trainer.batch.groups import GroupError, Rules, SamplingRules, parse_batch, wire_row
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.errors import ConfigError, NonFiniteError
from example_trainer.models import Decoder
from example_trainer.training import step
from example_trainer.training.model import make_reference
from example_trainer.training.reference import ReferenceScorer, ReferenceSettings
from example_trainer.training.step import response_logprobs
from tests.example_trainer.training.test_step import (
    GEOMETRY,
    config,
    gradients_of,
    make_groups,
    make_model,
    packed,
)
from vllm_patching.batch_invariant.plan import SumPlan

CONFIG = TrainerConfig(model_name="m", seq_len=64)


def settings_of(model: Decoder, **changed: Any) -> ReferenceSettings:
    return replace(ReferenceSettings.of(CONFIG, model), **changed)


def deterministic_model() -> Decoder:
    plain, model = make_model(3), deterministic_decoder(GEOMETRY, torch.float32)
    model.load_state_dict(plain.state_dict())
    return model


def trainers_own(
    model: Decoder, groups: list[dict[str, Any]], tokens_per_bin: int, share: bool, ranks: int = 1
) -> dict[tuple[int, int], bytes]:
    """The bits that a trainer computes for each sequence, in bins of a whole batch."""
    rules = Rules(sampling=SamplingRules(allow_narrowed=True), reference="optional")
    (shares,) = pack_batch(
        parse_batch(groups, 64, 31, rules), tokens_per_bin=tokens_per_bin, ranks=ranks, normalisation="token", max_tokens=64,
        share_prefixes=share, temperature=CONFIG.temperature,
    )  # fmt: skip
    found = {}
    for bin in (one for bins in shares for one in bins if not one.empty):
        with torch.no_grad():
            logprobs, _ = response_logprobs(model, bin, CONFIG)
        for (group, i), row in zip(
            bin.orders.tolist(), logprobs.split(bin.counts.tolist()), strict=True
        ):
            found[group, i] = row.numpy().tobytes()
    return found


def workers(
    model: Decoder,
    groups: list[dict[str, Any]],
    settings: ReferenceSettings,
    options: TrainerConfig = CONFIG,
) -> dict[tuple[int, int], bytes]:
    """The bits that a trainer reads of what a worker answers."""
    scorer = ReferenceScorer(model, options)
    scored = [group | {"ref_logprobs": scorer.rows(group, settings)} for group in groups]
    batch = parse_batch(
        scored, 64, 31, Rules(sampling=SamplingRules(allow_narrowed=True), reference="required")
    )
    assert not batch.invalid
    return {
        s.order: s["reference_logprobs"].tobytes()
        for s in batch.sequences
        if "reference_logprobs" in s.fields
    }


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("budget", "ranks"), [(40, 1), (90, 2), (10**6, 1)])
def test_deterministic_rows_have_the_trainers_bits_whatever_shares_a_pass(
    budget: int, ranks: int, share: bool
) -> None:
    """Also where the trainer does not share what the worker shares."""
    model, groups = deterministic_model(), make_groups(6, prompt_length=30)
    settings = settings_of(model, share_prefixes=share)
    expected = trainers_own(model, groups, budget, False, ranks)
    assert trainers_own(model, groups, budget, share, ranks) == expected
    assert workers(model, groups, settings) == expected
    small = TrainerConfig(model_name="m", seq_len=64, tokens_per_microbatch=7)
    assert workers(model, groups, settings, small) == expected


def test_a_worker_follows_the_sum_plan_of_each_trainer() -> None:
    worker, groups = deterministic_model(), make_groups(6)
    found = {}
    for parts in (2, 1):
        trainer = deterministic_model()
        trainer.arithmetic.plan = SumPlan(parts)
        of_trainer = settings_of(trainer, share_prefixes=False)
        settings = settings_of(worker, share_prefixes=False).agreed(of_trainer.for_the_wire())
        assert settings == of_trainer
        found[parts] = workers(worker, groups, settings)
        assert found[parts] == trainers_own(trainer, groups, 90, False)
    assert found[1] != found[2]
    for parts, told in ((8, "attention heads of the reference m cannot"), (3, "a sum of 3 parts")):
        with pytest.raises(ConfigError, match=told):
            workers(worker, groups, settings_of(worker, share_prefixes=False, parts=parts))


@pytest.mark.parametrize("share", [False, True])
def test_float32_rows_have_the_trainers_bits_where_it_packs_alike_and_are_close_elsewhere(
    share: bool,
) -> None:
    model, groups = make_model(3), make_groups(5, prompt_length=30)
    settings = settings_of(model, share_prefixes=share)
    found = workers(model, groups, settings)
    alone = {
        (n, i): row
        for n, one in enumerate(groups)
        for (_, i), row in trainers_own(model, [one], 4096, share).items()
    }
    assert found == alone
    for order, row in trainers_own(model, groups, 70, not share).items():
        there, here = np.frombuffer(row, np.float32), np.frombuffer(found[order], np.float32)
        assert np.abs(there - here).max() < 1e-4


def test_each_turn_is_scored_at_its_own_temperature() -> None:
    model, rng = make_model(3), random.Random(0)
    tokens = [[rng.randrange(31) for _ in range(12)] for _ in range(2)]
    masks = [[-100, -100, *row[2:5], -100, -100, *row[7:]] for row in tokens]
    said = [
        [{"temperature": 0.5, "tokens": 3}, {"temperature": 1.0, "top_p": 0.9, "tokens": 5}],
        {"temperature": 0.7},
    ]
    group = {"tokens": tokens, "masks": masks, "scores": [0.0, 1.0], "sampling_params": said}
    wire = {name: group[name] for name in ("tokens", "masks", "sampling_params")}
    rows = ReferenceScorer(model, CONFIG).rows(wire, settings_of(model))
    logits = model.logits(torch.tensor(tokens)).detach()
    for i, heats in enumerate(([0.5] * 3 + [1.0] * 5, [0.7] * 8)):
        places = [2, 3, 4, 7, 8, 9, 10, 11]
        expected = [
            (logits[i, t - 1] / heat).log_softmax(-1)[tokens[i][t]].item()
            for t, heat in zip(places, heats, strict=True)
        ]
        assert [rows[i][t] for t in places] == pytest.approx(expected, abs=1e-5)
        assert [rows[i][t] for t in range(12) if t not in places] == [1.0] * 4
    assert workers(model, [group], settings_of(model)) == trainers_own(model, [group], 4096, True)


def test_what_is_too_long_is_not_scored() -> None:
    model = make_model(3)
    group = {
        "tokens": [[1, 2, 3], [1] * 9],
        "masks": [[-100, 2, 3], [-100] + [1] * 8],
        "sampling_params": None,
    }
    rows = ReferenceScorer(model, CONFIG).rows(group, settings_of(model, seq_len=4))
    assert rows[0][1] < 0
    assert rows[1] == [1.0] * 9
    every = group | {"tokens": [[1] * 9], "masks": [[-100] + [1] * 8]}
    assert ReferenceScorer(model, CONFIG).rows(every, settings_of(model, seq_len=4)) == [[1.0] * 9]


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (
            {"tokens": [[1, 31]], "masks": [[-100, 31]]},
            r"tokens\[0\] holds 31, and the model's ids go from 0 to 30",
        ),
        ({"tokens": [[1, 2]], "masks": [[-100]]}, r"masks\[0\] has 1 entries"),
        (
            {"tokens": [[1, 2]], "masks": [[-100, 2]], "sampling_params": [{"temperature": 0}]},
            "sampled at temperature 0",
        ),
        ({"tokens": None, "masks": []}, "tokens is missing"),
    ],
)
def test_a_group_that_cannot_be_scored_is_said(group: dict[str, Any], told: str) -> None:
    model = make_model(3)
    with pytest.raises(GroupError, match=told):
        ReferenceScorer(model, CONFIG).rows(group, settings_of(model))


def test_a_model_that_computes_nan_is_no_reference() -> None:
    model = make_model(3)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(
        NonFiniteError, match="the reference m computes NaN or infinity for 2 of 2 tokens"
    ):
        ReferenceScorer(model, CONFIG).rows(
            {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]]}, settings_of(model)
        )


@pytest.mark.parametrize(
    ("registered", "told"),
    [
        (
            {"model": "other"},
            "--model-name m, but the trainer's reference is other; give the same name",
        ),
        ({"vocab_size": 32}, "has a vocabulary of 31 ids here, and the trainer's model one of 32"),
        (
            {"dtype": "bfloat16"},
            "the trainer computes in bfloat16 and this worker in float32; give it --dtype bfloat16",
        ),
        (
            {"table": "invariant"},
            "the invariant operations, this worker with the reference ones.*; give --deterministic",
        ),
        ({"table": "fast"}, "the fast operations.*; start it on a GPU"),
    ],
)
def test_who_would_compute_something_else_is_told_in_a_line(
    registered: dict[str, Any], told: str
) -> None:
    settings = settings_of(make_model(3))
    with pytest.raises(ConfigError, match=told) as caught:
        settings.agreed(settings.for_the_wire() | registered)
    assert "\n" not in str(caught.value)


def test_the_rest_is_the_trainers() -> None:
    settings = settings_of(make_model(3))
    agreed = settings.agreed(
        {"temperature": 0.7, "seq_len": 128, "share_prefixes": False, "table": None, "of_later": 1}
    )
    assert agreed == replace(settings, temperature=0.7, seq_len=128, share_prefixes=False)
    assert settings.agreed({}) == settings


def test_a_trainer_loads_no_reference_where_workers_have_it() -> None:
    model = make_model(3)
    asks = TrainerConfig(model_name="m", kl_coef=0.1, ref_logprobs_from_workers=True)
    assert make_reference(asks, model, torch.float32, torch.device("cpu")) is None
    assert (asks.loads_reference, asks.asks_reference_workers) == (False, True)
    with_adapters = TrainerConfig(
        model_name="m",
        kl_coef=0.1,
        ref_logprobs_from_workers=True,
        weight_bridge_mode="lora_only",
        lora_r=2,
    )
    assert (with_adapters.loads_reference, with_adapters.has_base_model) == (False, True)
    assert TrainerConfig(model_name="m", kl_coef=0.1).loads_reference
    told = ReferenceSettings.of(asks, model).for_the_wire()
    said = registration(asks, 3, reference=told)
    assert (said.ref_logprobs_from_workers, said.reference) == (True, told)
    assert not registration(CONFIG, 3).ref_logprobs_from_workers
    with pytest.raises(ValueError, match="--ref-logprobs-from-workers needs --kl-coef"):
        TrainerConfig(model_name="m", ref_logprobs_from_workers=True)


@pytest.mark.parametrize(("asks", "problems"), [(False, 0), (True, 1)])
def test_only_where_no_reference_is_held_a_group_must_bring_its_logprobs(
    asks: bool, problems: int
) -> None:
    options = TrainerConfig(model_name="m", kl_coef=0.1, ref_logprobs_from_workers=asks, seq_len=64)
    one, two = make_groups(1, count=2)
    one["ref_logprobs"] = [[-1.0] * len(row) for row in one["tokens"]]
    batch = BatchReader(options, 31, 4096).read([one, two], 0).batch
    assert len(batch.invalid) == problems
    assert all("ref_logprobs is missing" in told for told in batch.invalid)


OPTIONS = config(kl_coef=0.3, temperature=0.8)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Decoder, PackedBin]]:
    """Every pass of any model."""
    seen: list[tuple[Decoder, PackedBin]] = []
    real = step.response_logprobs

    def counted(model: Decoder, bin: PackedBin, *rest: Any) -> Any:
        seen.append((model, bin))
        return real(model, bin, *rest)

    monkeypatch.setattr(step, "response_logprobs", counted)
    return seen


def bins_of(groups: list[dict[str, Any]]) -> list[PackedBin]:
    return packed(parse_batch(groups, 64, 31, Rules(reference="optional")), OPTIONS)[0]


def scored(groups: list[dict[str, Any]], reference: Decoder) -> list[dict[str, Any]]:
    """The groups with the reference's logprobs in the very bins that they are trained in."""
    rows = [[[1.0] * len(row) for row in group["tokens"]] for group in groups]
    for bin in bins_of(groups):
        with torch.no_grad():
            found, _ = step.response_logprobs(reference, bin, OPTIONS)
        counts = bin.counts.tolist()
        for (group, i), part, places in zip(
            bin.orders.tolist(), found.split(counts), bin.positions.split(counts), strict=True
        ):
            rows[group][i] = wire_row(len(rows[group][i]), places.numpy(), part.numpy())
    return [group | {"ref_logprobs": found} for group, found in zip(groups, rows, strict=True)]


def test_a_step_on_what_came_along_is_the_step_on_what_is_computed_here(
    passes: list[tuple[Decoder, PackedBin]],
) -> None:
    groups, reference = make_groups(2), make_model(seed=9)
    given = scored(groups, reference)
    own, own_row = gradients_of(bins_of(groups), OPTIONS, reference)
    passes.clear()
    found, row = gradients_of(bins_of(given), OPTIONS)  # no reference is there at all
    assert row == own_row
    assert row["reference_kl"] != 0
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert all(model is not reference for model, _ in passes)


def test_the_reference_is_asked_for_the_missing_alone(
    passes: list[tuple[Decoder, PackedBin]],
) -> None:
    groups, reference = make_groups(4), make_model(seed=9)
    given = scored(groups, reference)
    mixed = [given[0], groups[1], given[2]]
    mixed[0]["ref_logprobs"][2] = [1.0] * len(given[0]["tokens"][2])
    passes.clear()
    found, row = gradients_of(bins_of(mixed), OPTIONS, reference)
    asked = [order for model, bin in passes if model is reference for order in bin.orders.tolist()]
    assert sorted(asked) == [[0, 2], [1, 0], [1, 1], [1, 2], [1, 3]]
    own, own_row = gradients_of(bins_of(groups), OPTIONS, reference)
    assert row["reference_kl"] == pytest.approx(own_row["reference_kl"], rel=1e-5)
    for name in own:
        torch.testing.assert_close(found[name], own[name], atol=1e-6, rtol=1e-4)


def test_what_is_missing_without_a_reference_is_said(
    passes: list[tuple[Decoder, PackedBin]],
) -> None:
    with pytest.raises(
        RuntimeError, match="without the reference's logprobs, and there is no reference"
    ):
        gradients_of(bins_of(make_groups(2)), OPTIONS)
