"""The cost of exactness: the trainer's passes by length, and vLLM's engines in each mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.gpu import exact_lengths, rollout_worker

pytestmark = pytest.mark.nightly


@pytest.mark.usefixtures("forked_children")
def test_exact_passes_repeat_and_have_their_kernels_in_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"512, {way}" for way in exact_lengths.WAYS]
    words = ["--output", str(tmp_path), "--tiny", "--device", "cpu", "--only", *names]
    assert exact_lengths.main(words) == 0
    written = json.loads((tmp_path / "exact_lengths.json").read_text())
    ordinary, exact = (written["cases"][name] for name in names)
    assert (ordinary["arithmetic"], exact["arithmetic"]) == ("reference", "invariant")
    assert exact["repeats"] is True
    assert "repeats" not in ordinary
    for case in (ordinary, exact):
        longest = [seconds for *_, seconds in case["kernels"]]
        assert longest == sorted(longest, reverse=True)
        assert 0 < sum(longest) <= case["busy_seconds"] * 1.001
    assert written["ratios"]["512"].keys() == {"exact"}
    printed = capsys.readouterr().out
    assert f"x {exact['kernels'][0][0]}" in printed


@pytest.mark.parametrize("mode", rollout_worker.MODES)
def test_each_mode_of_vllm_is_started_over_the_gpus_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine_options: dict[str, Any] = {}

    class Engine:
        def __init__(self, **options: Any) -> None:
            engine_options.update(options)

        def collective_rpc(self, name: str) -> list[str]:
            return [name]

    vllm = ModuleType("vllm")
    vllm.LLM = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")

    def prepare(args: Any, shared: bool) -> None:
        args.tensor_parallel_size, args.block_size = args.tensor_parallel_size, 16

    monkeypatch.setattr("vllm_patching.batch_invariant.mode.prepare_server", prepare)
    worker = rollout_worker.RolloutWorker(mode, "folder", tp=2)
    report = worker.load(max_model_len=64, max_num_seqs=4, cache_bytes=1 << 20)
    assert engine_options["tensor_parallel_size"] == 2
    assert ("block_size" in engine_options) == (mode == "ours")
    assert ("self_test" in report) == (mode == "ours")
