"""The report of a step's tokens: the very numbers of its passes, of whole groups, within bounds."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.dashboard.rollouts.rollout_stats import TrainerReport
from example_trainer.batch.client import RolloutClient
from example_trainer.batch.groups import parse_batch
from example_trainer.batch.prefetch import Batches
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.models import Decoder
from example_trainer.observe import token_report
from example_trainer.observe.token_report import TokenReport, chosen
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import guarded_step, make_objective, response_logprobs
from tests.example_trainer.batch.test_prefetch import Client
from tests.example_trainer.batch.test_prefetch import group as group_of
from tests.example_trainer.training.test_step import config, make_groups, make_model, packed

PLACES = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(0, 3)), st.integers(1, 40), max_size=20
)


def apart(model: Decoder, bins: Any, options: Any) -> dict[tuple[int, int], tuple[Any, Any]]:
    """Logprobs and entropies of each sequence, in a pass of their own."""
    found = {}
    for one in bins:
        with torch.no_grad():
            logprobs, entropy = response_logprobs(model, one, options)
        rows = zip(
            logprobs.split(one.counts.tolist()), entropy.split(one.counts.tolist()), strict=True
        )
        for (group, sequence), (some, others) in zip(one.orders.tolist(), rows, strict=True):
            found[group, sequence] = some, others
    return found


@pytest.mark.parametrize("updates", [1, 2])
def test_the_numbers_are_those_of_the_first_update(updates: int) -> None:
    options = config(minibatches=updates)
    batch = parse_batch(make_groups(3, prompt_length=5), 64, 31)
    minibatches = packed(batch, options)
    model = make_model()
    optimizer = MasterAdamW(model, lr=0.1)
    expected = apart(model, minibatches[0], options)
    report = TokenReport(3)
    guarded_step(
        model, optimizer, minibatches, options, make_objective(options), StopSignal(), report=report
    )
    told = report.take()
    assert told is not None
    assert told["weight_version"] == 0
    found = list(TrainerReport.model_validate(told).trained_tokens())
    assert len(found) == min(3, len(expected))
    sequences = {sequence.order: sequence for sequence in batch.sequences}
    for group, place, trained in found:
        logprobs, entropies = expected[group, place]
        assert torch.equal(torch.from_numpy(trained.logprobs.copy()), logprobs)
        assert torch.equal(torch.from_numpy(trained.entropies.copy()), entropies)
        assert trained.advantages.tolist() == sequences[group, place]["advantages"].tolist()
        assert trained.trained == len(sequences[group, place].positions)
    assert report.take() is None, "a batch is reported once"


@given(
    trained=PLACES, version=st.integers(0, 9), sequences=st.integers(0, 9), most=st.integers(0, 100)
)
def test_whole_groups_are_chosen_within_the_bounds(
    trained: dict[tuple[int, int], int], version: int, sequences: int, most: int
) -> None:
    room = chosen(trained, version, sequences, most)
    assert sum(room.values()) == min(most, sum(room.values()))
    assert len(room) <= sequences
    assert all(room[place] <= trained[place] for place in room)
    assert chosen(dict(reversed(trained.items())), version, sequences, most) == room, (
        "whatever the bins"
    )
    if most >= sum(trained.values()):
        assert len(room) == min(sequences, len(trained))
        groups = {group for group, _ in room}
        cut = [
            group
            for group in groups
            if any(place[0] == group and place not in room for place in trained)
        ]
        assert len(cut) <= 1


def test_a_long_sequence_is_told_from_its_beginning_and_a_report_fits_what_every_service_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = config()
    (bins,) = packed(parse_batch(make_groups(1), 64, 31), options, tokens=1000)
    count = sum(len(one.targets) for one in bins)
    report = TokenReport(1000, most_tokens=5)
    report.begin(4, bins)
    for one in bins:
        report.add(one, torch.full((len(one.targets),), -0.5), torch.ones(len(one.targets)))
    told = report.take()
    assert told is not None
    assert sum(
        len(trained.logprobs)
        for _, _, trained in list(TrainerReport.model_validate(told).trained_tokens())
    ) == min(5, count)
    assert token_report.MOST_TOKENS * 3 * 4 * 4 / 3 < (1 << 20) * 0.6
    assert TokenReport(0).take() is None


def test_a_report_is_told_once_and_at_once() -> None:
    client = Client(group_of(5), group_of(6))
    reader = BatchReader(
        TrainerConfig.model_validate({"model_name": "m"}), vocab_size=1000, tokens_per_bin=64
    )
    batches = Batches(
        cast(RolloutClient, client),
        Ranks(),
        reader,
        torch.device("cpu"),
        last_version=4,
        ahead=False,
    )
    try:
        batches.next(0)
        batches.acknowledge(1, hold=True, report={"number": 1})
        batches.next(1)
        batches.acknowledge(2, report={"number": 2})
    finally:
        batches.close()
    assert client.reports == [{"number": 1}, None, {"number": 2}], (
        "with what is held, and not again when it is let go of"
    )
