"""Several updates of a batch: PPO written down, what is worked out once, and what a later update's
failure leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from example_trainer.algorithm.advantages import group_advantages
from example_trainer.algorithm.losses import LossInputs, LossSettings
from example_trainer.algorithm.objective import StepFigures
from example_trainer.batch.groups import parse_batch
from example_trainer.errors import BatchError, NonFiniteError, OutOfMemoryError
from example_trainer.models import Decoder
from example_trainer.process import StopRequested, StopSignal
from example_trainer.training import step
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import (
    SkippedBatches,
    guarded_step,
    make_objective,
    passes_ahead,
)
from tests.example_trainer.in_process import STEPS, Trainers
from tests.example_trainer.test_grpo import made_up_group
from tests.example_trainer.training.test_skipping import InPasses, not_a_number, nothing_left
from tests.example_trainer.training.test_step import config, make_groups, make_model, packed

pytestmark = pytest.mark.timeout(240)


def made(**options: Any) -> tuple[Decoder, MasterAdamW]:
    model = make_model()
    optimizer = MasterAdamW(
        model, lr=0.02, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, **options
    )
    model.arithmetic.sums = optimizer.sums
    return model, optimizer


def torch_adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """torch's optimizer with the options of `made`."""
    by_kind: list[list[torch.nn.Parameter]] = [[], []]
    for parameter in parameters:
        by_kind[parameter.dim() >= 2].append(parameter)
    groups = [{"params": by_kind[1], "weight_decay": 0.1}, {"params": by_kind[0]}]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)


def logprobs_in(
    model: Decoder, groups: Sequence[dict[str, Any]], group: int, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the trained tokens of a sequence: the policy's, the sampler's."""
    tokens = torch.tensor(groups[group]["tokens"][number])
    trained = [t for t, token in enumerate(groups[group]["masks"][number]) if token != -100]
    table = model.logits(tokens[None])[0].log_softmax(-1)
    sampled = torch.tensor(groups[group]["inference_logprobs"][number])[trained]
    return torch.stack([table[t - 1, tokens[t]] for t in trained]), sampled


def test_two_epochs_of_two_minibatches_are_ppo_written_down() -> None:
    """Decoupled PPO with truncated weights: the ratio is to the weights that the batch began with,
    c theirs to the sampler.
    """
    groups = make_groups(4)
    options = config(ppo_epochs=2, minibatches=2, correction_high=1.1)
    model, optimizer = made()
    minibatches = packed(parse_batch(groups, 64, 31), options)
    members = [
        [tuple(order) for bin in bins for order in bin.orders.tolist()] for bins in minibatches
    ]
    assert len(members) == 2
    row = guarded_step(
        model, optimizer, minibatches, options, make_objective(options), StopSignal()
    )

    plain = make_model()
    named = dict(plain.named_parameters())
    theirs = torch_adamw(named.values())
    logprobs_of = partial(logprobs_in, plain, groups)
    with torch.no_grad():
        proximal = {order: logprobs_of(*order)[0] for part in members for order in part}
    losses, norms, clipped, tokens_seen = [], [], 0, 0
    for part in members * 2:
        count = sum(len(proximal[order]) for order in part)
        loss = torch.zeros(())
        for group, number in part:
            advantage = group_advantages(groups[group]["scores"])[number]
            now, sampled = logprobs_of(group, number)
            ratio = (now - proximal[group, number]).exp()
            correction = (proximal[group, number] - sampled).exp().clamp(max=1.1)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss - (correction * surrogate).sum() / count
            clipped += int(
                (((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))).sum()
            )
        theirs.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        theirs.step()
        losses.append(loss.item())
        tokens_seen += count
    for name, master in optimizer.masters.items():
        torch.testing.assert_close(
            master, named[name], atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    drift = torch.cat(
        [(proximal[order] - logprobs_of(*order)[1]).exp() for part in members for order in part]
    )
    counts = (optimizer.steps, optimizer.updates, row["updates"], row["updates_skipped"])
    assert counts == (1, 4, 4, 0)
    assert row["loss"] == pytest.approx(sum(losses) / 4, rel=1e-3, abs=1e-6)
    assert row["grad_norm"] == pytest.approx(max(norms), rel=1e-3)
    assert row["clip_fraction"] == pytest.approx(clipped / tokens_seen)
    assert clipped > 0, "the comparison has nothing to compare"
    assert row["ratio_mean"] == pytest.approx(drift.mean().item(), rel=1e-4), (
        "drift is that of the first weights"
    )


class Passes:
    """Counts the forward passes of each model, and may do something in the course of one of them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        number: int = -1,
        work: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        self.of: list[Decoder] = []
        real = step.response_logprobs

        def counted(model: Decoder, *rest: Any) -> Any:
            self.of.append(model)
            logprobs, entropy = real(model, *rest)
            return (work(logprobs) if work and len(self.of) - 1 == number else logprobs), entropy

        monkeypatch.setattr(step, "response_logprobs", counted)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, True),
        ({"correction_ratio": "now"}, False),
        ({"correction": "none"}, False),
        ({"correction": "none", "sequence_kl_limit": 1.0}, True),
        ({"correction": "sequence_mask", "minibatches": 1}, False),
    ],
)
def test_passes_that_nothing_needs_are_not_made(
    options: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(**({"ppo_epochs": 3, "minibatches": 2, "kl_coef": 0.01} | options))
    (model, optimizer), reference = made(), make_model(seed=5)
    minibatches = packed(parse_batch(make_groups(4), 64, 31), chosen)
    bins = [len(one) for one in minibatches]
    passes = Passes(monkeypatch)
    row = guarded_step(
        model, optimizer, minibatches, chosen, make_objective(chosen), StopSignal(), reference
    )
    assert passes.of.count(reference) == sum(bins), "its logprobs do not change in a batch"
    assert passes.of.count(model) == 3 * sum(bins) + (sum(bins[1:]) if ahead else 0)
    assert row["reference_kl"]
    assert row["ratio_mean"]
    assert passes_ahead(make_objective(chosen)) == (ahead or chosen.minibatches == 1)
    tokens = [sum(len(bin.targets) for bin in minibatch) for minibatch in minibatches]
    whole = ahead or len(minibatches) == 1
    assert row["drift_share"] == pytest.approx(1 if whole else tokens[0] / sum(tokens)), (
        "and what it is of is told"
    )


def stop_is_asked(_: torch.Tensor) -> None:
    raise StopRequested(15)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (nothing_left, "out of memory at optimizer step 0, in a pass over up to"),
        (not_a_number, "the gradient of"),
        (stop_is_asked, "SIGTERM"),
    ],
)
def test_what_a_batch_taught_before_a_failure_stays(
    fault: Callable[[Any], Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = config(ppo_epochs=2, minibatches=2, correction="none", skip_nonfinite=1)
    minibatches = packed(parse_batch(make_groups(4), 64, 31), options, tokens=1000)
    assert [len(bins) for bins in minibatches] == [1, 1]
    found = []
    for count in (2, None):
        model, optimizer = made()
        with monkeypatch.context() as patch:
            Passes(patch, -1 if count is None else count, fault)
            epochs = options if count else config(ppo_epochs=1, minibatches=2, correction="none")
            row = guarded_step(
                model, optimizer, minibatches, epochs, make_objective(options), StopSignal()
            )
        assert (optimizer.steps, optimizer.updates, optimizer.sound) == (1, 2, True)
        assert optimizer.gradients() == {}
        found.append(({name: master.clone() for name, master in optimizer.masters.items()}, row))
    (masters, row), (expected, whole) = found
    assert all(torch.equal(masters[name], tensor) for name, tensor in expected.items())
    assert row == whole | {"updates_skipped": 2}, "of what failed there are no figures"
    assert (
        "Step 1: updates 3 to 4 of its batch are left out, what it learned in those before stays: "
        in caplog.text
    )
    assert told in caplog.text


@pytest.mark.parametrize(
    ("fault", "limit", "error"),
    [
        (nothing_left, "max_skipped_batches", OutOfMemoryError),
        (not_a_number, "skip_nonfinite", NonFiniteError),
    ],
)
def test_a_later_update_that_fails_is_counted_as_a_batch_is(
    fault: Callable[[Any], Any],
    limit: str,
    error: type[BatchError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = config(ppo_epochs=2, correction="none", **{limit: 0})
    minibatches = packed(parse_batch(make_groups(4), 64, 31), options, tokens=1000)
    model, optimizer = made()
    Passes(monkeypatch, 1, fault)
    skipped, objective = SkippedBatches(options), make_objective(options)
    row = guarded_step(
        model, optimizer, minibatches, options, objective, StopSignal(), skipped=skipped
    )
    assert (row["updates"], row["updates_skipped"]) == (1, 1)
    with pytest.raises(
        error, match=r"; this was update 2 of 2 of its batch, and those before are kept$"
    ):
        skipped.refuse()
    assert (optimizer.steps, optimizer.updates, optimizer.sound) == (1, 1, True), (
        "the end of its step can be saved"
    )


@pytest.mark.parametrize(("what", "number"), [("__init__", 0), ("add", 0), ("add", 2)])
def test_figures_that_find_no_memory_are_as_a_pass_that_finds_none(
    what: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update's leave the batch out; a later one's leave that update out, before it is
    taken.
    """
    options = config(ppo_epochs=2, minibatches=2)
    minibatches = packed(parse_batch(make_groups(4), 64, 31), options, tokens=1000)
    model, optimizer = made()
    real, calls = getattr(StepFigures, what), 0

    def greedy(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == number:
            torch.empty(1 << 52)
        real(*arguments)

    monkeypatch.setattr(StepFigures, what, greedy)
    if number == 0:
        with pytest.raises(
            OutOfMemoryError, match=r"^out of memory at optimizer step 0, in a pass over up to "
        ):
            guarded_step(
                model, optimizer, minibatches, options, make_objective(options), StopSignal()
            )
        assert (optimizer.steps, optimizer.updates, optimizer.sound, optimizer.gradients()) == (
            0,
            0,
            True,
            {},
        )
        return
    row = guarded_step(
        model, optimizer, minibatches, options, make_objective(options), StopSignal()
    )
    assert (optimizer.updates, optimizer.steps, optimizer.gradients()) == (2, 1, {})
    once = config(ppo_epochs=1, minibatches=2)
    expected = guarded_step(*made(), minibatches, once, make_objective(options), StopSignal())
    assert row == expected | {"updates_skipped": 2}, "of what failed there are no figures"


@pytest.mark.parametrize(
    ("fault", "number", "error"),
    [
        (nothing_left, 0, OutOfMemoryError),
        (nothing_left, 1, OutOfMemoryError),
        (not_a_number, 1, NonFiniteError),
    ],
)
def test_a_first_update_that_fails_teaches_nothing(
    fault: Callable[[Any], Any],
    number: int,
    error: type[BatchError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first pass is the one ahead, of the second minibatch."""
    options = config(ppo_epochs=2, minibatches=2)
    minibatches = packed(parse_batch(make_groups(4), 64, 31), options, tokens=1000)
    model, optimizer = made()
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    Passes(monkeypatch, number, fault)
    with pytest.raises(error):
        guarded_step(model, optimizer, minibatches, options, make_objective(options), StopSignal())
    assert (optimizer.steps, optimizer.updates, optimizer.sound) == (0, 0, True)
    assert optimizer.gradients() == {}
    assert all(torch.equal(master, before[name]) for name, master in optimizer.masters.items())


def test_a_run_goes_on_behind_a_batch_that_taught_in_part(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    trainers.post(*range(STEPS))
    trainers.faults[1] = InPasses(nothing_left, [4])
    assert trainers.train("--ppo-epochs", "2", "--minibatches", "2", "--checkpoint-interval", "1")
    assert trainers.line == list(range(STEPS))
    assert (len(trainers.acknowledged), trainers.skipped) == (STEPS, [])
    rows = trainers.rows()
    assert [(row["updates"], row["updates_skipped"], row["weight_version"]) for row in rows] == [
        (4, 0, 1), (2, 2, 2), (4, 0, 3), (4, 0, 4),
    ]  # fmt: skip
    assert [trainers.saved()[number].updates for number in sorted(trainers.saved())] == [14]
    assert "Step 2: updates 3 to 4 of its batch are left out" in caplog.text


def test_a_run_whose_later_updates_all_fail_ends_with_what_was_learned(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    """The first update of each batch is sound, and its step complete: that must not let half of the
    batches count for ever.
    """
    trainers.post(*range(STEPS))
    trainers.faults = dict.fromkeys(range(STEPS), InPasses(not_a_number, range(2, 100, 2)))
    with pytest.raises(NonFiniteError) as caught:
        trainers.train("--ppo-epochs", "2", "--checkpoint-interval", "0", "--skip-nonfinite", "1")
    assert str(caught.value).startswith(
        "2 batches in a row could not be trained on (--skip-nonfinite 1); the last: the gradient of"
    )
    assert str(caught.value).endswith(
        "; this was update 2 of 2 of its batch, and those before are kept"
    )
    assert "Step 1: updates 2 to 2 of its batch are left out" in caplog.text
    assert "(1 of 1 in a row, --skip-nonfinite)" in caplog.text
    assert [(saved.step, saved.updates) for saved in trainers.saved().values()] == [(2, 2)]
    assert trainers.skipped == []


def post_without_logprobs(trainers: Trainers, number: int) -> None:
    group = made_up_group(number)
    del group["inference_logprobs"]
    httpx.post(f"{trainers.url}/scored_data", json=group, timeout=120).raise_for_status()


def test_rollouts_without_logprobs_are_corrected_by_nothing(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 1):
        post_without_logprobs(trainers, number)
    trainers.post(2, 3)
    assert trainers.train()
    assert [row["missing_rollout_logprobs"] for row in trainers.rows()] == [1, 1, 0, 0]
    assert caplog.text.count("is not corrected (--correction token_truncate does nothing)") == 1
    httpx.get(f"{trainers.url}/reset_data", timeout=120).raise_for_status()
    post_without_logprobs(trainers, 0)
    trainers.post(*range(1, STEPS + 1))
    assert trainers.train("--correction", "token_mask")
    assert trainers.line == [1, 2, 3, 4]
    (reason,) = trainers.skipped
    assert reason.startswith(
        "--correction token_mask: none of the batch's tokens came with the logprob that it was sampled with"
    )


def spoiled(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """A loss of a user's that is not a number for a bin of many sequences."""
    return (
        torch.where(torch.tensor(inputs.sequences > 3), torch.nan, 0.0)
        - inputs.log_ratio.exp() * inputs.advantages
    )


def test_a_loss_that_is_not_finite_is_named() -> None:
    options = config(loss=f"{__name__}:spoiled")
    model, optimizer = made()
    minibatches = packed(parse_batch(make_groups(1, count=1), 64, 31), options, tokens=1000)
    tokens = sum(len(bin.targets) for bin in minibatches[0])
    with pytest.raises(
        NonFiniteError,
        match=rf"^--loss {__name__}:spoiled is NaN or infinite for {tokens} of {tokens} tokens",
    ):
        guarded_step(model, optimizer, minibatches, options, make_objective(options), StopSignal())
    assert (optimizer.steps, optimizer.sound, optimizer.gradients()) == (0, True, {})
    few = packed(parse_batch(make_groups(1, count=1, size=3), 64, 31), options, tokens=1000)
    guarded_step(model, optimizer, few, options, make_objective(options), StopSignal())
    assert optimizer.steps == 1
