"""What stops a run: one bit of one logprob, other kernels, other weights; and what two equal runs have in common."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from example_trainer.deterministic.decoder import DeterministicDecoder, GradientSums
from pydantic import ValidationError

from example_trainer.batch.client import registration
from example_trainer.batch.groups import Batch
from example_trainer.deterministic.pairing import make_parity, model_provenance, pair
from example_trainer.deterministic.parity import NoParity, ParityCheck, ParityError, weights_sha
from example_trainer.errors import ConfigError, ModelError
from example_trainer.models import Decoder
from example_trainer.models.geometry import RopeScaling
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.model import decoder_maker, refuse_ranks
from example_trainer.training.optimizer import make_optimizer
from example_trainer.training.step import accumulate_gradients, response_logprobs
from tests.example_trainer.deterministic.training import (
    SMALL,
    config,
    decoder_for,
    first_microbatch,
    rollouts,
    summed_gradients,
    train,
)

KERNELS = {"linear": "cublaslt 130100", "rms_norm": "lockstep abc"}


def with_one_bit_changed(batch: Batch, sequence: int, token: int) -> Batch:
    changed = batch.sequences[sequence].rollout_logprobs.copy()
    changed[token] = np.nextafter(changed[token], np.float32(0))
    sequences = list(batch.sequences)
    sequences[sequence] = replace(sequences[sequence], rollout_logprobs=changed)
    return Batch(sequences)


def test_one_bit_of_one_token_stops_the_run_before_the_step(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    model.sums = GradientSums()
    options = config(tmp_path, batch_size=6)
    optimizer = make_optimizer(options, model)
    before = weights_sha(optimizer.masters)
    batch = with_one_bit_changed(rollouts(model, 1, 0), sequence=3, token=1)
    with pytest.raises(ParityError) as error:
        accumulate_gradients(model, optimizer, batch, options, StopSignal(), parity=ParityCheck(KERNELS, KERNELS))
    sequence = batch.sequences[3]
    theirs, ours = float(sequence.rollout_logprobs[1]), float(rollouts(model, 1, 0).sequences[3].rollout_logprobs[1])
    message = str(error.value)
    assert message.startswith(f"1 of {batch.trained_tokens} tokens of a microbatch differ")
    where = f"first group 1, sequence 1, position {sequence.positions[1]}, token {sequence.tokens[sequence.positions[1]]}: "
    assert f"{where}vLLM {theirs!r} (0x" in message
    assert f"trainer {ours!r} (0x" in message
    assert "both sides name the same kernels" in message
    assert "\n" not in message
    assert weights_sha(optimizer.masters) == before
    assert all(gradient is None for gradient in optimizer.gradients().values())


def test_without_stopping_differences_are_counted_and_measured(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    model.sums = GradientSums()
    options = config(tmp_path)
    optimizer = make_optimizer(options, model)
    batch = rollouts(model, 1, 0)
    sequence = batch.sequences[2]
    wrong = sequence.rollout_logprobs.copy()
    wrong[:2] -= np.float32(0.5)
    parity = ParityCheck(KERNELS, KERNELS, stop=False)
    sequences = [*batch.sequences[:2], replace(sequence, rollout_logprobs=wrong), *batch.sequences[3:]]
    accumulate_gradients(model, optimizer, Batch(sequences), options, StopSignal(), parity=parity)
    optimizer.step()
    row = parity.row(optimizer)
    assert (row["mismatched_tokens"], row["compared_tokens"]) == (2, batch.trained_tokens)
    assert row["max_logprob_difference"] == pytest.approx(0.5, abs=1e-5)
    assert row["parity_kl"] == pytest.approx(2 * (math.exp(0.5) - 1.5) / batch.trained_tokens, rel=1e-4)
    accumulate_gradients(model, optimizer, rollouts(model, 1, 1), options, StopSignal(), parity=parity)
    assert parity.row(optimizer)["mismatched_tokens"] == 0, "a step's figures are its own"
    assert parity.row(optimizer)["parity_kl"] == 0.0


@pytest.mark.parametrize("version", [None, 2, 4])
def test_rollouts_of_other_weights_are_refused(tmp_path: Path, version: int | None) -> None:
    model = decoder_for("cpu")
    batch = rollouts(model, 1, 0)
    batch.sequences[4] = replace(batch.sequences[4], weight_version=version)
    for number in (0, 1, 2, 3, 5):
        batch.sequences[number] = replace(batch.sequences[number], weight_version=3)
    with pytest.raises(
        ParityError, match=f"group 2, sequence 0 was sampled under weight version {version}, the trainer holds 3"
    ):
        ParityCheck(KERNELS, KERNELS).begin(batch, 3)


def test_a_token_without_a_logprob_is_a_mismatch() -> None:
    model = decoder_for("cpu")
    batch = rollouts(model, 1, 0)
    unknown = np.full_like(batch.sequences[0].rollout_logprobs, np.nan)
    micro = first_microbatch(Batch([replace(batch.sequences[0], rollout_logprobs=unknown)]))
    with torch.no_grad(), pytest.raises(ParityError, match=rf"\({len(unknown)} came without a logprob\)"):
        ParityCheck(KERNELS, KERNELS).compare(micro, model.response_logprobs(micro, 64)[0])


def test_a_negative_zero_is_not_zero() -> None:
    """Compared are bits, not values."""
    model = decoder_for("cpu")
    micro = first_microbatch(rollouts(model, 1, 0))
    zeros = torch.zeros_like(micro.rollout_logprobs)
    with pytest.raises(ParityError):
        ParityCheck(KERNELS, KERNELS).compare(replace(micro, rollout_logprobs=-zeros), zeros)
    ParityCheck(KERNELS, KERNELS).compare(replace(micro, rollout_logprobs=zeros), zeros)


def test_a_server_with_other_kernels_is_refused() -> None:
    ours = model_provenance(decoder_for("cpu"))
    table = ours["rotary_table"]
    kernels = {name: kernel for name, kernel in ours.items() if name != "rotary_table"}
    assert pair(ours, {"deterministic": {"provenance": kernels, "rotary_table": table}}, "http://s") == ours
    with pytest.raises(ParityError, match="server at http://s is not in deterministic mode; start it with --deterministic"):
        pair(ours, {"deterministic": None}, "http://s")
    other = {"provenance": kernels | {"linear": "triton"}, "rotary_table": table}
    with pytest.raises(ParityError, match=r"does not run this trainer's kernels.*linear: .*'triton' there"):
        pair(ours, {"deterministic": other}, "http://s")
    with pytest.raises(ParityError, match="rotary_table: "):
        pair(ours, {"deterministic": {"provenance": kernels, "rotary_table": "0000"}}, "http://s")
    fewer = {name: kernel for name, kernel in kernels.items() if name != "attention_varlen"}
    with pytest.raises(ParityError, match=r"attention_varlen: .*'missing' there"):
        pair(ours, {"deterministic": {"provenance": fewer, "rotary_table": table}}, "http://s")


def test_the_trainer_asks_the_server_which_kernels_it_runs(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    kernels = model_provenance(model)
    reports = [{"provenance": kernels, "rotary_table": kernels["rotary_table"]}, None]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"instance": "a", "deterministic": reports[0]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        options = config(tmp_path, vllm_servers=[address])
        assert type(make_parity(options, model)) is ParityCheck
        del reports[0]
        with pytest.raises(ParityError, match=f"server at http://{address} is not in deterministic mode"):
            make_parity(options, model)
        server.shutdown()
    assert isinstance(make_parity(options.model_copy(update={"deterministic": False}), model), NoParity)


def test_an_ordinary_model_is_not_passed_off_as_a_deterministic_one() -> None:
    with pytest.raises(ParityError, match="a Decoder does not run vLLM's kernels"):
        model_provenance(Decoder(SMALL, torch.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_bridge_mode": "none"}, "--deterministic needs --weight-bridge-mode shared_vllm, which is 'none'"),
        ({"weight_bridge_mode": "lora_only"}, "--deterministic needs --weight-bridge-mode shared_vllm"),
        ({"temperature": 0.7}, "--deterministic needs --temperature 1, which is 0.7"),
        ({"max_staleness": 2}, "--deterministic needs --max-staleness 0, which is 2"),
    ],
)
def test_options_that_cannot_be_exact_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(tmp_path, **changes)


def test_what_deterministic_mode_sets(tmp_path: Path) -> None:
    options = config(tmp_path)
    assert registration(options, 0).max_staleness == 0
    model = decoder_maker(options, Ranks(0, 1))(SMALL, torch.float32, torch.device("cpu"))
    assert isinstance(model, DeterministicDecoder)
    assert model.sums is not None
    with pytest.raises(ConfigError, match="--deterministic trains in one process"):
        refuse_ranks(options, Ranks(0, 2))
    with pytest.raises(ModelError, match="rope scaling 'linear' has no deterministic mode yet"):
        DeterministicDecoder(replace(SMALL, rope_scaling=RopeScaling("linear", 2.0)), torch.float32)


def test_equal_runs_have_equal_hashes_and_packing_does_not_matter(tmp_path: Path) -> None:
    reference = train(config(tmp_path), steps=3)
    assert len(set(reference)) == 3, "every step changes the weights, and with them the hash"
    assert train(config(tmp_path), steps=3) == reference
    for changes in ({"batch_size": 1}, {"batch_size": 6, "logprob_chunk": 70}, {"gradient_checkpointing": True}):
        assert train(config(tmp_path, **changes), steps=3) == reference, changes
    assert train(config(tmp_path, lr=1.1e-2), steps=1) != reference[:1]
    assert train(config(tmp_path), steps=1, seed=1) != reference[:1]


def test_summed_gradients_are_those_of_autograd() -> None:
    """Every parameter gets one, the tied matrix from both its uses."""
    model = decoder_for("cpu")
    sequences = [torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 70, 64)]
    summed = summed_gradients(model, sequences, 2)
    plain = Decoder(SMALL, torch.float64)
    plain.load_state_dict({name: p.double() for name, p in model.state_dict().items()})
    plain.rotary = model.rotary.double()
    for sequence in sequences:
        logprobs = plain.logits(sequence[None])[0].log_softmax(-1)
        logprobs.gather(1, sequence.roll(-1)[:, None]).sum().backward()
    exact = {name: p.grad for name, p in plain.named_parameters()}
    assert summed.keys() == exact.keys()
    for name, gradient in exact.items():
        assert gradient is not None
        assert float((summed[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_padding_is_not_computed_and_logprobs_are_those_of_the_plain_decoder(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    micro = first_microbatch(rollouts(model, 5, 0), size=6)
    plain = Decoder(SMALL, torch.float32)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        ours, entropy = response_logprobs(model, micro, config(tmp_path))
        theirs, other = response_logprobs(plain, micro, config(tmp_path))
    assert torch.equal(ours, micro.rollout_logprobs)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, other, atol=2e-5, rtol=1e-5)
