"""Deterministic mode's refusals, its self-test, and the comparison of both sides' settings."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.flash_attention import flash_attention_version
from vllm_patching.batch_invariant.mode import (
    SHARED_WORKER,
    DeterminismRefused,
    check_sampling,
    joined_reports,
    prepare_server,
    refuse_flags,
)
from vllm_patching.batch_invariant.patches import sum_over_ranks
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.batch_invariant.provenance import (
    OPERATIONS,
    provenance,
    provenance_difference,
    table_hash,
)
from vllm_patching.batch_invariant.self_test import first_difference, ran
from vllm_patching.batch_invariant.settings import (
    ENVIRONMENT,
    enable_settings,
    nccl_variables,
    pinned,
    restore_nccl,
    settings,
)
from vllm_patching.compat.batch_invariant import (
    keep_ordered_sums,
    start_batch_invariance,
    sums_in_one_kernel,
)


@pytest.mark.parametrize("takes_backend", [False, True])
@pytest.mark.parametrize("reads_when", ["called", "imported"])
def test_every_form_of_vllms_function_is_called(
    takes_backend: bool, reads_when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions differ in its arguments, and in when they read the variable."""
    module, given = ModuleType("some_mode"), []
    if takes_backend:
        module.init_batch_invariance = lambda attention_backend: given.append(
            attention_backend.name
        )  # type: ignore[attr-defined]
    else:
        module.init_batch_invariance = lambda: given.append("")  # type: ignore[attr-defined]
    if reads_when == "imported":
        module.vllm_is_batch_invariant = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_mode", module)
    monkeypatch.setattr("vllm_patching.compat.batch_invariant._mode_module", lambda: "some_mode")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert start_batch_invariance() is (reads_when == "called")
    assert given == ["FLASH_ATTN" if takes_backend else ""]


def flags(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"dtype": "auto", "tensor_parallel_size": 1, "kv_cache_dtype": "auto", **changed}
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size 3 cannot be combined with --deterministic: pass 1, 2, 4 or 8",
        ),
        ({"tensor_parallel_size": 16}, "--tensor-parallel-size 16 cannot"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        *(
            (
                {
                    "tensor_parallel_size": 2,
                    "compilation_config": SimpleNamespace(
                        pass_config=SimpleNamespace(**{name: True})
                    ),
                },
                f"--compilation-config with {name} cannot be combined with --deterministic: it sums",
            )
            for name in ("fuse_allreduce_rms", "enable_sp")
        ),
        ({"enable_lora": True}, "adapters have no counterpart in the trainer; leave it out"),
        ({"data_parallel_size": 2}, "start one server for each replica instead"),
        ({"kv_cache_dtype": "fp8"}, "the model's dtype"),
        ({"block_size": 32}, "pages of 16"),
        ({"inflight_cache": "keep"}, "old and new weights"),
        ({"logprobs_mode": "processed_logprobs"}, "kernels that the trainer does not run"),
        ({"dtype": "float16"}, "--dtype bfloat16"),
    ],
)
def test_a_flag_that_changes_the_bits_is_refused(changed: dict[str, object], why: str) -> None:
    with pytest.raises(
        DeterminismRefused, match="cannot be combined with --deterministic"
    ) as refusal:
        refuse_flags(flags(**changed))
    assert why in str(refusal.value)


def test_flags_without_influence_are_accepted() -> None:
    unset = SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=None, enable_sp=False))
    refuse_flags(flags(tensor_parallel_size=8, compilation_config=unset))
    refuse_flags(
        flags(dtype="bfloat16", block_size=16, speculative_config=None, logits_processors=[])
    )


@pytest.mark.parametrize(
    "changed",
    [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_tokens": 3}],
)
def test_a_request_that_samples_from_something_else_is_refused(changed: dict[str, float]) -> None:
    from vllm import SamplingParams

    check_sampling(SamplingParams(max_tokens=4, seed=1, logprobs=0))
    check_sampling(SamplingParams(max_tokens=4, temperature=0.0))
    with pytest.raises(DeterminismRefused, match=f"^{next(iter(changed))} "):
        check_sampling(SamplingParams(max_tokens=4, **changed))


def test_whatever_is_not_sampling_is_refused() -> None:
    with pytest.raises(DeterminismRefused, match="samples and does nothing else"):
        check_sampling(object())


def test_self_test_passes_operations_that_ignore_the_batch() -> None:
    x, weight = torch.randn(300, 24), torch.randn(24)
    assert first_difference("rms_norm", lambda rows: ops.rms_norm(x[rows], weight, 1e-6), 300) == ""


@pytest.mark.parametrize("threshold", [2, 200, 256])
def test_self_test_names_the_first_value_that_depends_on_the_batch(threshold: int) -> None:
    x = torch.arange(1200, dtype=torch.float32).view(300, 4)

    def by_count(rows: slice) -> torch.Tensor:
        part = x[rows].clone()
        if len(part) < threshold:
            part[-1, 2] += 0.5
        return part

    said = first_difference("some norm", by_count, 300)
    assert said == (
        "some norm depends on the batch: of 1 rows by themselves and of the same among 300, 1 values differ, "
        "first at row 0, column 2: 2.5 against 2.0"
    )


def test_self_test_names_an_operation_that_does_not_run_here() -> None:
    def out_of_resources() -> str:
        raise RuntimeError(
            "out of resource: shared memory, Required: 180224, Hardware limit: 101376\nand more lines"
        )

    assert ran("linear o_proj", out_of_resources) == (
        "linear o_proj does not run on this GPU (none): RuntimeError: out of resource: shared memory, Required: 180224, "
        "Hardware limit: 101376"
    )
    assert ran("rms_norm", lambda: "a difference") == "a difference"
    assert ran("rms_norm", lambda: "") == ""


class Platform:
    """Stands for vLLM's description of a GPU of some compute capability."""

    def __init__(self, major: int, minor: int, cuda: bool = True) -> None:
        self.capability, self.cuda = SimpleNamespace(major=major, minor=minor), cuda

    def is_cuda(self) -> bool:
        return self.cuda

    def has_device_capability(self, number: int) -> bool:
        return 10 * self.capability.major + self.capability.minor >= number

    def is_device_capability_family(self, number: int) -> bool:
        return self.capability.major == number // 10

    def get_device_capability(self) -> SimpleNamespace:
        return self.capability

    def get_device_name(self) -> str:
        return "Some GPU"


@pytest.mark.parametrize(
    ("gpu", "version"),
    [((8, 0), 2), ((8, 9), 2), ((9, 0), None), ((10, 0), 2), ((12, 0), 2)],
    ids=lambda value: str(value),
)
def test_the_self_test_decides_on_every_gpu_since_ampere(
    gpu: tuple[int, int],
    version: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in (*ENVIRONMENT, "VLLM_BATCH_INVARIANT", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(name, "")
    # Its import asks the real platform for kernels.
    importlib.import_module("vllm.distributed.device_communicators.custom_all_reduce")
    monkeypatch.setattr("vllm.platforms.current_platform", Platform(*gpu))
    summing = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_USE_NCCL_SYMM_MEM")
    for name in (*summing, "VLLM_ALLREDUCE_USE_FLASHINFER"):
        monkeypatch.setenv(name, "1")
    attention = SimpleNamespace(flash_attn_version=None)
    args = flags(attention_config=attention, tensor_parallel_size=2)
    prepare_server(args, shared=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert args.worker_extension_cls == SHARED_WORKER
    assert not hasattr(args, "disable_custom_all_reduce"), "vLLM's mode pins its order"
    assert [os.environ[name] for name in summing] == ["0", "0"]
    assert args.attention_config.flash_attn_version == version, "Hopper's own choice is 3 already"
    assert ("on Some GPU the self-test decides" in caplog.text) is (version is not None)
    assert flash_attention_version(gpu[0]) == (version or 3)


def test_an_all_reduce_whose_order_is_not_pinned_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM 0.26, whose class does not name the mode."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    for name in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_USE_NCCL_SYMM_MEM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    asked = flags(disable_custom_all_reduce=True)
    keep_ordered_sums(asked)
    assert asked.disable_custom_all_reduce, "the user's own flag stays"
    monkeypatch.delattr(CustomAllreduce, "batch_invariant")
    args = flags(disable_custom_all_reduce=False)
    keep_ordered_sums(args)
    assert args.disable_custom_all_reduce


class Ranks:
    """vLLM's group of two ranks, which have the same part. Its one-stage all-reduce needs a GPU."""

    def __init__(self, reducer: object) -> None:
        self.device_communicator = SimpleNamespace(ca_comm=reducer)

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([part, part], dim)


def reducer(takes: bool = True, **changed: Any) -> SimpleNamespace:
    """Return a stand-in for vLLM's all-reduce that adds 100, to be seen."""
    given = {"batch_invariant": True, "disabled": not takes, **changed}
    return SimpleNamespace(custom_all_reduce=lambda x: 2 * x + 100 if takes else None, **given)


@pytest.mark.parametrize(
    ("given", "in_one_kernel"),
    [
        (reducer(), True),
        (reducer(takes=False), False),
        (reducer(batch_invariant=False), False),
        (None, False),
    ],
    ids=["one stage", "disabled between these GPUs", "order not pinned", "none"],
)
def test_parts_are_gathered_where_no_kernel_sums_them_in_order(
    given: object, in_one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(get_tp_group=lambda: Ranks(given))
    monkeypatch.setattr("vllm_patching.compat.batch_invariant._parallel_state", lambda: state)
    part = torch.arange(24.0).view(2, 3, 4)
    assert sums_in_one_kernel() is in_one_kernel
    total = sum_over_ranks(part)
    assert total.shape == part.shape
    assert torch.equal(total, 2 * part + 100 * in_one_kernel)


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (Platform(7, 5), "compute capability 8.0 or above, not Some GPU"),
        (Platform(9, 0, cuda=False), "needs an NVIDIA GPU"),
    ],
)
def test_a_machine_without_the_kernels_is_refused(
    platform: Platform, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    with pytest.raises(DeterminismRefused, match=message):
        prepare_server(flags(), shared=True)


def test_self_test_finds_what_does_not_repeat_itself() -> None:
    calls = []

    def second_call_differs(rows: slice) -> torch.Tensor:
        calls.append(rows)
        return torch.full((rows.stop - rows.start, 2), float(len(calls) == 2))

    assert "does not repeat itself" in first_difference("noise", second_call_differs, 40)


def test_a_zero_of_the_other_sign_is_a_difference() -> None:
    def operation(rows: slice) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, 1) * (-1.0 if rows.stop == 40 else 1.0)

    assert "-0.0" in first_difference("zero", operation, 40)


def test_provenance_names_every_operation_and_the_first_that_differs() -> None:
    ours = provenance()
    assert set(OPERATIONS) < set(ours)
    assert provenance_difference(ours, provenance()) == ""
    other = {**ours, "linear": "cublaslt 1"}
    assert (
        provenance_difference(ours, other) == f"linear: {ours['linear']!r} here, 'cublaslt 1' there"
    )
    assert provenance_difference(ours, {k: v for k, v in ours.items() if k != "torch"}).endswith(
        "'missing' there"
    )


def rank_report(parts: int = 2, **changed: Any) -> dict[str, Any]:
    report = {"provenance": provenance(SumPlan(parts)), "rotary_table": "ab", "checks": 5}
    return {**report, "failure": "", "seconds": 2.0, **changed}


def test_every_rank_of_a_server_is_in_its_report() -> None:
    joined = joined_reports([rank_report(), rank_report(checks=6, seconds=3.0)])
    assert joined == {
        "provenance": provenance(SumPlan(2)), "rotary_table": "ab", "checks": 11, "seconds": 3.0
    }  # fmt: skip
    assert joined_reports([rank_report(1)])["checks"] == 5


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (rank_report(failure="o_proj depends"), "failed on rank 1 of 2, so nothing is served: o_p"),
        (
            rank_report(rotary_table="cd"),
            "rank 0 and rank 1 of this server .* rotary_table: 'ab' here",
        ),
        (rank_report(4), "sum_plan: 'parts=2' here, 'parts=4' there; give it GPUs of one kind"),
    ],
)
def test_a_server_whose_ranks_differ_does_not_serve(second: dict[str, Any], message: str) -> None:
    with pytest.raises(DeterminismRefused, match=message):
        joined_reports([rank_report(), second])


def test_tables_differ_by_a_bit_or_a_shape() -> None:
    table = ops.rotary_table(16, 32, 1e4, torch.bfloat16, torch.device("cpu"))
    changed = table.clone()
    changed.view(torch.int16)[3, 3] ^= 1
    assert len({table_hash(table), table_hash(changed), table_hash(table[:-1])}) == 3
    assert table_hash(table) == table_hash(table.clone())


def test_settings_are_pinned_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "something else")
    before = {name: value for name, value in pinned().items() if name not in ENVIRONMENT}
    with settings() as now:
        assert now["bf16_split_k"] == "False"
        assert now["fp32_precision"] == "ieee"
        assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
        assert enable_settings() == now
    assert {name: value for name, value in pinned().items() if name not in ENVIRONMENT} == before


def test_nccl_gets_its_environment_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own variables would have the bridge's two sides choose different protocols."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    before = nccl_variables()
    for name, value in (("NCCL_PROTO", "Simple"), ("NCCL_DEBUG", "INFO")):
        monkeypatch.setenv(name, value)
    restore_nccl(before)
    assert nccl_variables() == before
    assert before["NCCL_DEBUG"] == "WARN"
