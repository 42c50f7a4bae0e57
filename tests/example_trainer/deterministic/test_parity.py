"""Reasons to stop a run: one bit of one logprob, other kernels, other weights; and the common
values of two equal runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atroposlib.dashboard.rollouts.rollout_stats import Parity
from example_trainer.batch.client import registration
from example_trainer.batch.groups import UNKNOWN_VERSION, Batch, parse_batch
from example_trainer.batch.packing import PackedBin
from example_trainer.deterministic.pairing import (
    agreed_plan,
    deterministic_decoder,
    followed_plan,
    make_pairing,
    make_parity,
    model_provenance,
    pair,
)
from example_trainer.deterministic.parity import PairingError, ParityCheck, ParityError, weights_sha
from example_trainer.errors import BridgeError, ModelError
from example_trainer.models import Decoder
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.model import decoder_maker
from example_trainer.training.optimizer import make_optimizer
from example_trainer.training.rank_plan import refuse_ranks
from example_trainer.training.step import guarded_step, make_objective, response_logprobs
from tests.exact_sampler import in_float64
from tests.example_trainer.deterministic.training import (
    SMALL,
    bins,
    config,
    decoder_for,
    rollouts,
    summed_gradients,
    train,
)
from tests.http_server import Answer, HttpServer, Request
from vllm_patching.batch_invariant import reference
from vllm_patching.batch_invariant.plan import ENTRY, SumPlan
from vllm_patching.weights.families import RopeScaling

KERNELS = {"linear": "cublaslt 130100", "rms_norm": "lockstep abc"}


def with_one_bit_changed(batch: Batch, sequence: int, token: int) -> Batch:
    changed = batch.sequences[sequence]["rollout_logprobs"].copy()
    changed[token] = np.nextafter(changed[token], np.float32(0))
    sequences = list(batch.sequences)
    sequences[sequence] = sequences[sequence].with_fields(rollout_logprobs=changed)
    return Batch(sequences)


def test_one_bit_of_one_token_stops_the_run_before_the_step(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    options = config(tmp_path)
    optimizer = make_optimizer(options, model)
    before = weights_sha(optimizer.masters)
    batch = with_one_bit_changed(rollouts(model, 1, 0), sequence=3, token=1)
    (packed,) = bins(batch, tokens=1000)
    parity = ParityCheck(KERNELS, KERNELS)
    with pytest.raises(ParityError) as error:
        guarded_step(
            model,
            optimizer,
            [[packed]],
            options,
            make_objective(options),
            StopSignal(),
            parity=parity,
        )
    sequence = batch.sequences[3]
    theirs, ours = (
        float(sequence["rollout_logprobs"][1]),
        float(rollouts(model, 1, 0).sequences[3]["rollout_logprobs"][1]),
    )
    message = str(error.value)
    assert message.startswith(f"1 of {batch.trained_tokens} tokens of a microbatch differ")
    where = f"first group 1, sequence 1, position {sequence.positions[1]}, token {sequence.tokens[sequence.positions[1]]}: "
    assert f"{where}vLLM {theirs!r} (0x" in message
    assert f"trainer {ours!r} (0x" in message
    assert "both sides name the same kernels" in message
    assert "\n" not in message
    assert weights_sha(optimizer.masters) == before
    assert optimizer.sums is not None
    assert optimizer.sums.take() == {}


def _silu_and_mul_in_float32(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


IN_FLOAT32: dict[str, Callable[..., Any]] = {
    "silu_and_mul": _silu_and_mul_in_float32,
    "log_sum_exp": lambda logits: torch.logsumexp(logits, dim=-1),
}
"""Other kernels in place of the kernels that take their exponentials in float64 themselves."""


@pytest.mark.parametrize(
    "name",
    ["linear", "rms_norm", "rotary_embedding", "silu_and_mul", "attention_varlen", "log_sum_exp"],
)
def test_one_other_kernel_on_the_trainers_side_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The negative control: what is sampled with the shared kernels differs from this trainer."""
    model, options = decoder_for("cpu"), config(tmp_path)
    optimizer = make_optimizer(options, model)
    before = weights_sha(optimizer.masters)
    packed = bins(rollouts(model, 1, 0), tokens=1000)
    objective, stop = make_objective(options), StopSignal()

    def step() -> None:
        parity = ParityCheck(KERNELS, KERNELS)
        guarded_step(model, optimizer, [packed], options, objective, stop, parity=parity)

    other = IN_FLOAT32.get(name) or in_float64(getattr(reference, name))
    with monkeypatch.context() as swapped:
        swapped.setattr(reference, name, other)
        with pytest.raises(ParityError, match=r"tokens of a microbatch differ .* by up to \d"):
            step()
    assert weights_sha(optimizer.masters) == before
    step()
    assert weights_sha(optimizer.masters) != before


def test_without_stopping_differences_are_counted_and_measured(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    options = config(tmp_path)
    optimizer = make_optimizer(options, model)
    batch = rollouts(model, 1, 0)
    sequence = batch.sequences[2]
    wrong = sequence["rollout_logprobs"].copy()
    wrong[:2] -= np.float32(0.5)
    parity = ParityCheck(KERNELS, KERNELS, stop=False)
    sequences = [
        *batch.sequences[:2],
        sequence.with_fields(rollout_logprobs=wrong),
        *batch.sequences[3:],
    ]
    objective = make_objective(options)
    guarded_step(
        model, optimizer, [bins(Batch(sequences))], options, objective, StopSignal(), parity=parity
    )
    row = parity.row(optimizer.masters)
    assert (row["mismatched_tokens"], row["compared_tokens"]) == (2, batch.trained_tokens)
    assert row["max_logprob_difference"] == pytest.approx(0.5, abs=1e-5)
    assert row["parity_kl"] == pytest.approx(
        2 * (math.exp(0.5) - 1.5) / batch.trained_tokens, rel=1e-4
    )
    learned = guarded_step(
        model,
        optimizer,
        [bins(rollouts(model, 1, 1))],
        options,
        objective,
        StopSignal(),
        parity=parity,
    )
    row = parity.row(optimizer.masters)
    assert (row["mismatched_tokens"], row["parity_kl"]) == (0, 0.0), "a step's figures are its own"
    assert learned["perplexity_trainer"] == learned["perplexity_rollout"] > 1, "to the bit"
    exact = ("ess", "ratio_mean", "ratio_p01", "ratio_max", "correction_weight", "correction_ess")
    assert {learned[name] for name in exact} == {1.0}
    assert (learned["mismatch_kl"], learned["kl"]) == (0.0, 0.0)
    assert (parity.mismatched_in_all, parity.compared_in_all) == (2, 2 * batch.trained_tokens)


@pytest.mark.parametrize("version", [None, 2, 4])
def test_rollouts_of_other_weights_are_refused(version: int | None) -> None:
    batch = rollouts(decoder_for("cpu"), 1, 3)
    number = UNKNOWN_VERSION if version is None else version
    other = np.full(len(batch.sequences[4].positions), number)
    batch.sequences[4] = batch.sequences[4].with_fields(versions=other)
    parity = ParityCheck(KERNELS, KERNELS)
    parity.begin(3)
    (packed,) = bins(batch, tokens=1000)
    with pytest.raises(
        ParityError,
        match=f"group 2, sequence 0 was sampled under weight version {version}, the trainer holds 3",
    ):
        parity.compare(packed, packed["rollout_logprobs"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([UNKNOWN_VERSION, 1, 2, 3]), st.sampled_from([0.0, 0.25, math.nan])
        ),
        min_size=1,
    )
)
def test_where_older_tokens_are_allowed_those_of_the_present_weights_alone_are_compared(
    drawn: list[tuple[int, float]],
) -> None:
    versions = torch.tensor([version for version, _ in drawn])
    shifts = torch.tensor([0.0 if version == 3 else shift for version, shift in drawn])
    parity = ParityCheck(KERNELS, KERNELS, older=True)
    parity.begin(3)
    recomputed = torch.full((len(drawn),), -2.0)
    parity.compare(bin_of(versions, recomputed + shifts), recomputed)
    row = parity.row({"weight": torch.zeros(2)})
    fresh = sum(version == 3 for version, _ in drawn)
    assert (row["compared_tokens"], row["mismatched_tokens"], row["older_tokens"]) == (
        fresh,
        0,
        len(drawn) - fresh,
    )
    assert (row["parity_kl"], row["max_logprob_difference"]) == (0.0, 0.0)
    known = [shift for version, shift in drawn if version != 3 and not math.isnan(shift)]
    expected = sum(math.expm1(-shift) + shift for shift in known) / max(1, len(known))
    assert row["older_kl"] == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
        min_size=2,
        max_size=3,
    ),
    st.integers(1, 90),
)
def test_weights_that_change_within_an_answer_divide_its_tokens(
    spans: list[list[tuple[int, int]]], tokens_of_a_bin: int
) -> None:
    """Each token's logprob names its version: other bits are allowed for older ones alone."""
    lengths = [sum(count for _, count in row) for row in spans]
    held = [[version for version, count in row for _ in range(count)] for row in spans]
    group = {
        "tokens": [[1, *[2] * length] for length in lengths],
        "masks": [[-100, *[2] * length] for length in lengths],
        "scores": [float(number % 2) for number in range(len(spans))],
        "inference_logprobs": [[1.0, *(-float(version) for version in row)] for row in held],
        "weight_versions": [min(row) for row in held],
        "weight_version_spans": [[list(span) for span in row] for row in spans],
    }
    batch = parse_batch([group], 100, 97, version=3)
    parity = ParityCheck(KERNELS, KERNELS, older=True)
    parity.begin(3)
    for packed in bins(batch, tokens_of_a_bin):
        parity.compare(packed, torch.full((len(packed["versions"]),), -3.0))
    row = parity.row({"weight": torch.zeros(2)})
    present = sum(version == 3 for one in held for version in one)
    assert (row["compared_tokens"], row["mismatched_tokens"]) == (present, 0)
    assert row["older_tokens"] == sum(lengths) - present
    assert (float(row["older_kl"]) > 0) == (present < sum(lengths))


def test_the_service_gets_the_counts_and_kernels_that_it_does_not_know_yet() -> None:
    servers: dict[str, dict[str, Any]] = {}
    parity = ParityCheck(KERNELS, KERNELS, older=True, servers=servers)
    recomputed = torch.full((4,), -2.0)

    def step(version: int) -> dict[str, Any]:
        parity.begin(version)
        parity.compare(bin_of(torch.tensor([3, 2, 3, 2]), recomputed), recomputed)
        report: dict[str, Any] = parity.report()["parity"]
        return report

    first = step(3)
    assert first["kernels"] == {"trainer": KERNELS, "servers": {}}
    assert (first["compared"], first["older"], first["older_in_all"]) == (2, 2, 2)
    second = step(4)
    assert "kernels" not in second
    assert (second["compared"], second["older"], second["older_in_all"]) == (0, 4, 6)
    servers["http://s"] = {"kernels": KERNELS, "checks": 7, "seconds": 0.5}
    assert step(4)["kernels"]["servers"] == servers
    assert Parity.model_validate(first | {"kernels": {"trainer": KERNELS, "servers": servers}})


def test_a_token_of_the_present_weights_is_compared_among_older_ones() -> None:
    parity = ParityCheck(KERNELS, KERNELS, older=True)
    parity.begin(3)
    recomputed = torch.full((4,), -2.0)
    sampled = torch.tensor([-2.0, -2.5, -2.5, -2.0])
    with pytest.raises(
        ParityError,
        match=r"^1 of 3 tokens of a microbatch differ .* by up to 0.5; first group 7, seq",
    ):
        parity.compare(bin_of(torch.tensor([3, 2, 3, 3]), sampled), recomputed)


def bin_of(versions: Tensor, logprobs: Tensor) -> PackedBin:
    """Trained tokens with these versions and logprobs, the first of group 7's first sequence, the
    others of its second.
    """
    count = len(versions)
    counts = torch.tensor([1, count - 1]) if count > 1 else torch.tensor([1])
    rows, ones = torch.arange(count), torch.ones(count)
    return PackedBin(
        tokens=torch.zeros(count + 1, dtype=torch.int64),
        lengths=torch.tensor([count + 1]),
        parents=torch.tensor([-1]),
        sources=rows,
        targets=rows,
        fields={
            "rollout_logprobs": logprobs,
            "advantages": ones,
            "versions": versions,
            "temperatures": ones,
            "teacher_logprobs": torch.full((count,), math.nan),
            "reference_logprobs": torch.full((count,), math.nan),
        },
        weights=ones,
        positions=rows + 1,
        counts=counts,
        orders=torch.tensor([[7, number] for number in range(len(counts))]),
        unreferenced=counts,
        reference_pass=torch.ones(1, dtype=torch.int64),
        routed=torch.zeros((0, 0), dtype=torch.int16),
        shared_by=torch.ones(count + 1, dtype=torch.int32),
    )


def test_a_token_without_a_logprob_is_a_mismatch() -> None:
    lost = torch.full((3,), math.nan)
    with pytest.raises(ParityError, match=r"\(3 came without a logprob\)"):
        ParityCheck(KERNELS, KERNELS).compare(
            bin_of(torch.zeros(3, dtype=torch.int64), lost), torch.zeros(3)
        )


def test_a_negative_zero_is_not_zero() -> None:
    """Compared are bits, not values."""
    zeros, versions = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ParityError):
        ParityCheck(KERNELS, KERNELS).compare(bin_of(versions, -zeros), zeros)
    ParityCheck(KERNELS, KERNELS).compare(bin_of(versions, zeros), zeros)


def test_a_server_with_other_kernels_is_refused() -> None:
    ours = model_provenance(decoder_for("cpu"))
    table = ours["rotary_table"]
    kernels = {name: kernel for name, kernel in ours.items() if name != "rotary_table"}
    assert (
        pair(ours, {"deterministic": {"provenance": kernels, "rotary_table": table}}, "http://s")
        == ours
    )
    with pytest.raises(
        ParityError,
        match="server at http://s is not in deterministic mode; start it with --deterministic",
    ):
        pair(ours, {"deterministic": None}, "http://s")
    other = {"provenance": kernels | {"linear": "triton"}, "rotary_table": table}
    with pytest.raises(
        ParityError, match=r"does not run this trainer's kernels.*linear: .*'triton' there"
    ):
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

    def answer(request: Request) -> Answer:
        return 200, {"instance": "a", "deterministic": reports[0]}

    with HttpServer(answer) as server:
        address = f"127.0.0.1:{server.port}"
        options = config(tmp_path, vllm_servers=[address])
        pairing = make_pairing(options, model)
        assert pairing is not None
        assert pairing.servers[f"http://{address}"]["kernels"] == kernels
        assert type(make_parity(options, pairing)) is ParityCheck
        del reports[0]
        with pytest.raises(
            ParityError, match=f"server at http://{address} is not in deterministic mode"
        ):
            make_pairing(options, model)
    ordinary = options.model_copy(update={"deterministic": False})
    assert make_pairing(ordinary, model) is None
    assert make_parity(ordinary, None) is None


def test_a_server_with_other_kernels_is_left_out_where_enough_others_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = decoder_for("cpu")
    kernels = model_provenance(model)
    report = {"provenance": kernels, "rotary_table": kernels["rotary_table"], "checks": 7}
    other = report | {"provenance": kernels | {"plan": "parts 2"}}

    def answering(told: dict[str, Any]) -> HttpServer:
        return HttpServer(lambda _: (200, {"instance": "a", "deterministic": told}))

    with answering(report) as good, answering(other) as bad:
        servers = [f"127.0.0.1:{server.port}" for server in (bad, good)]
        pairing = make_pairing(config(tmp_path, vllm_servers=servers), model)
        assert pairing is not None
        assert {url: server["checks"] for url, server in pairing.servers.items()} == {
            f"http://{servers[1]}": 7
        }
        assert pairing.theirs == kernels
        refusal = f"the vLLM server at http://{servers[0]} does not run this trainer's kernels"
        assert refusal in caplog.text
        assert "plan: 'missing' here, 'parts 2' there" in caplog.text
        assert "training begins with 1 others" in caplog.text
        with pytest.raises(PairingError, match=f"^{refusal}"):
            make_pairing(config(tmp_path, vllm_servers=servers, min_servers=2), model)
        with pytest.raises(PairingError):
            make_pairing(config(tmp_path, vllm_servers=servers[:1]), model)


def test_a_parameter_server_pairs_its_servers_itself(tmp_path: Path) -> None:
    """Nothing is asked of it: nothing listens at its address."""
    options = config(
        tmp_path, weight_bridge_mode="parameter_server", parameter_servers=["127.0.0.1:9"]
    )
    pairing = make_pairing(options, decoder_for("cpu"))
    assert pairing is not None
    assert pairing.theirs == pairing.kernels
    assert pairing.servers == {}


def served(model: Decoder) -> dict[str, object]:
    """/bridge/info of a server that runs this model's kernels and plan."""
    kernels = model_provenance(model)
    report = {"provenance": kernels, "rotary_table": kernels["rotary_table"]}
    return {"instance": "a", "deterministic": report}


def test_the_trainer_takes_the_plan_of_the_server_before_it_loads(tmp_path: Path) -> None:
    sampler = deterministic_decoder(SMALL, torch.float32, plan=SumPlan(4))
    with HttpServer(lambda _: (200, served(sampler))) as server:
        options = config(tmp_path, vllm_servers=[f"127.0.0.1:{server.port}"])
        plan = agreed_plan(options, SMALL, Ranks())
        assert plan == SumPlan(4)
        make = decoder_maker(options, Ranks(0, 1), plan=plan)
        model = make(SMALL, torch.float32, torch.device("cpu"))
        assert model.arithmetic.plan == plan
        assert make_pairing(options, model) is not None
        other = make(SMALL, torch.float32, torch.device("cpu"))
        other.arithmetic.plan = SumPlan(2)
        with pytest.raises(ParityError, match="sum_plan: 'parts=2' here, 'parts=4' there"):
            make_pairing(options, other)
    plain = options.model_copy(update={"deterministic": False})
    assert agreed_plan(plain, SMALL, Ranks()) == SumPlan(1), "no server is asked"


def held(options: dict[str, Any], *servers: HttpServer) -> dict[str, Any]:
    """Options of a trainer of these parameter servers."""
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    bridge = {"weight_bridge_mode": "parameter_server", "parameter_servers": addresses}
    return bridge | options


def test_the_plan_comes_through_a_parameter_server(tmp_path: Path) -> None:
    """The first has no vLLM server yet, and then none in deterministic mode."""
    report = {"server": "http://v:9001", "provenance": {ENTRY: "parts=2"}, "rotary_table": "0a"}
    idle = HttpServer(lambda _: (503, {"error": "none of its vLLM servers answers"}))
    other = HttpServer(lambda _: (409, {"error": "the vLLM server at http://w is ordinary"}))
    with idle, other, HttpServer(lambda _: (200, report)) as server:
        short = {"service_timeout": 1, "server_patience": 0.1}
        options = config(tmp_path, **held(short, idle, other, server))
        assert agreed_plan(options, SMALL, Ranks()) == SumPlan(2)
        odd = replace(SMALL, intermediate_size=41)
        with pytest.raises(PairingError, match=r"^the vLLM server at http://v:9001 sums 2 parts"):
            agreed_plan(options, odd, Ranks())
        refused = config(tmp_path, **held(short, other))
        with pytest.raises(BridgeError, match="refuses deterministic mode: the vLLM server at"):
            agreed_plan(refused, SMALL, Ranks())
        waiting = config(tmp_path, **held(short, idle))
        with pytest.raises(BridgeError, match=r"no parameter server at .* \(none of its vLLM"):
            agreed_plan(waiting, SMALL, Ranks())


@pytest.mark.parametrize(
    ("entry", "tensor_ranks", "changed", "message"),
    [
        (
            "parts=1", 2, {},
            "sums 1 part(s), which 2 tensor-parallel trainer ranks cannot share. Train with 1 such "
            "ranks, or start vLLM with --tensor-parallel-size 2 or 4 or 8",
        ),
        (
            "parts=2", 4, {},
            "Train with 1 or 2 such ranks, or start vLLM with --tensor-parallel-size 4 or 8",
        ),
        (
            "parts=8", 1, {},
            "sums 8 parts, and 4 attention heads of this trainer's model cannot be split so. Start "
            "vLLM with --tensor-parallel-size 1 or 2 or 4, or give both the same model",
        ),
        (
            "parts=4", 1, {"intermediate_size": 42},
            "and a feed-forward width of 42 of this trainer's model cannot be split so. Start vLLM "
            "with --tensor-parallel-size 1 or 2, or",
        ),
        (
            "parts=2", 1,
            {"architecture": "Qwen3MoeForCausalLM", "num_experts": 4, "experts_per_token": 2,
             "moe_intermediate_size": 15},
            "and experts with an inner width of 15 of this trainer's model cannot be split so. "
            "Start vLLM with --tensor-parallel-size 1",
        ),
        ("tree", 1, {}, "sums in another way than this trainer: sum_plan 'tree' is not of the form"),
        ("parts=3", 1, {}, "a sum of 3 parts: deterministic mode has 1, 2, 4 and 8"),
    ],
)  # fmt: skip
def test_a_plan_that_the_trainer_cannot_follow_is_refused_with_the_layouts_that_fit(
    entry: str, tensor_ranks: int, changed: dict[str, Any], message: str
) -> None:
    info = {"deterministic": {"provenance": {ENTRY: entry}}}
    with pytest.raises(ParityError) as refusal:
        followed_plan(info, "http://s", replace(SMALL, **changed), tensor_ranks)
    text = str(refusal.value)
    assert text.startswith("the vLLM server at http://s sums ")
    assert message in text
    assert "\n" not in text


def test_an_ordinary_model_is_not_passed_off_as_a_deterministic_one() -> None:
    with pytest.raises(
        ParityError, match="a model with the reference operations does not run vLLM's kernels"
    ):
        model_provenance(Decoder(SMALL, torch.float32))


def test_what_deterministic_mode_sets(tmp_path: Path) -> None:
    options = config(tmp_path)
    assert registration(options, 0).max_staleness == 0
    assert registration(config(tmp_path, max_staleness=2), 0).max_staleness == 2
    model = decoder_maker(options, Ranks(0, 1))(SMALL, torch.float32, torch.device("cpu"))
    assert model.arithmetic.ops.NAME == "invariant"
    assert make_optimizer(options, model).sums is model.arithmetic.sums is not None
    refuse_ranks(options, Ranks(0, 2))
    refuse_ranks(config(tmp_path, single_copy=True), Ranks(0, 2))
    with pytest.raises(ModelError, match="rope scaling 'linear' has no deterministic mode yet"):
        deterministic_decoder(
            replace(SMALL, rope_scaling=RopeScaling("linear", 2.0)), torch.float32
        )


def test_equal_runs_have_equal_hashes_and_packing_does_not_matter(tmp_path: Path) -> None:
    reference = train(config(tmp_path), steps=3)
    assert len(set(reference)) == 3, "every step changes the weights, and with them the hash"
    assert train(config(tmp_path), steps=3) == reference
    assert train(config(tmp_path, gradient_checkpointing=True), steps=3) == reference
    for tokens, chunk in ((1, 1024), (1000, 70)):
        assert train(config(tmp_path, logprob_chunk=chunk), steps=3, tokens=tokens) == reference, (
            tokens
        )
    none = config(tmp_path, correction="none")
    assert train(none, steps=3) == reference, "the default correction changes no bit"
    assert train(config(tmp_path, lr=1.1e-2), steps=1) != reference[:1]
    assert train(config(tmp_path), steps=1, seed=1) != reference[:1]


def test_summed_gradients_are_those_of_autograd() -> None:
    """Every parameter gets one, the tied matrix from both its uses."""
    model = decoder_for("cpu")
    sequences = [
        torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length))
        for length in (5, 70, 64)
    ]
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


def test_logprobs_are_those_of_the_plain_operations(tmp_path: Path) -> None:
    model = decoder_for("cpu")
    (packed,) = bins(rollouts(model, 5, 0), tokens=1000)
    plain = Decoder(SMALL, torch.float32)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        ours, entropy = response_logprobs(model, packed, config(tmp_path))
        theirs, other = response_logprobs(plain, packed, config(tmp_path))
    assert torch.equal(ours, packed["rollout_logprobs"])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, other, atol=2e-5, rtol=1e-5)


def test_several_updates_of_a_batch_are_compared_before_the_first_and_repeat(
    tmp_path: Path,
) -> None:
    """`train` checks that every token is compared, under the weights that sampled it."""
    options = config(tmp_path, ppo_epochs=2, minibatches=2)
    reference = train(options, steps=2)
    assert train(options, steps=2, tokens=1) == reference
    assert train(config(tmp_path), steps=2) != reference
