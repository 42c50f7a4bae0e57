"""The number of ranks that a trainer starts: by its GPUs, by --ranks, by vLLM's ranks, and by modes
of one process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError, ConfigError
from example_trainer.process import StopSignal
from example_trainer.training import rank_plan
from example_trainer.training.rank_plan import plan_ranks
from example_trainer.weight_bridge.factory import prefers_single_copy
from studies.starter_model import mixture
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.weights.sharding import ShardSpec, Slice

SHARED = {"weight_bridge_mode": "shared_vllm"}


def options(**values: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"model_name": "any", **values})


def server_info(
    ranks: int, gpus: tuple[str, ...] = (), dtype: str = "bfloat16", replicas: int = 1
) -> dict[str, Any]:
    """Return a server's answer at /bridge/info, for so many ranks, as far as a choice depends on
    it.
    """
    shard = ShardSpec("weight", (2, 3), (2, 3), (Slice(0, 0, 0, 2),))
    manifests = [
        Manifest(r, ranks, (ManifestEntry(shard, dtype, "cuda:0"),)).to_json() for r in range(ranks)
    ]
    return {
        "instance": "one", "tp_degree": ranks, "replicas": replicas, "device": "cuda" if gpus else "cpu",
        "gpu_uuids": list(gpus), "hostname": "elsewhere", "config_path": "/nowhere", "ranks": manifests,
    }  # fmt: skip


class Machine:
    """The GPUs that the trainer sees, by UUID, and the server that answers it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus: tuple[str, ...] = ()
        self.info: dict[str, Any] | None = None
        self.questions = 0
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        for module in (
            "example_trainer.training.rank_plan",
            "example_trainer.weight_bridge.factory",
        ):
            monkeypatch.setattr(f"{module}.gpu_uuid", lambda device: self.gpus[device.index])
        monkeypatch.setattr(rank_plan.BridgeServer, "wait_for_info", lambda _: self.answer())

    def answer(self) -> dict[str, Any]:
        self.questions += 1
        assert self.info is not None, "this server is not there to be asked"
        return self.info

    def plan(
        self, environment: dict[str, str] | None = None, **values: object
    ) -> rank_plan.RankPlan:
        return plan_ranks(options(**values), StopSignal(), environment or {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Machine:
    caplog.set_level(logging.INFO)
    return Machine(monkeypatch)


def test_a_trainer_has_a_rank_for_each_gpu_that_it_sees(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    broadcast = SHARED | {"use_shared_memory": True}
    assert machine.plan(**broadcast).count == 1, "on a CPU"
    machine.gpus = ("a",)
    assert machine.plan(**broadcast).count == 1
    assert caplog.text == ""
    machine.gpus = ("a", "b", "c")
    plan = machine.plan(**broadcast)
    assert (plan.count, plan.flags) == (3, ("--ranks", "3"))
    assert (
        "Starting 3 ranks with FSDP2: one for each GPU that this trainer sees (--ranks 1: one GPU)"
        in caplog.text
    )
    assert machine.plan(**broadcast, ranks=2).count == 2
    assert machine.plan(**broadcast, ranks=1).count == 1
    assert "[Ranks] This trainer uses one of the 3 GPUs that it sees: --ranks is 1" in caplog.text
    assert machine.plan(**broadcast, device="cuda:1").count == 1
    assert machine.plan(**broadcast, device="cpu").count == 1
    assert machine.plan(vllm_restart_interval=0).count == 3, "also without a bridge"
    assert machine.questions == 0


def test_ranks_on_a_cpu_are_started_when_they_are_asked_for(machine: Machine) -> None:
    assert machine.plan(**SHARED, use_shared_memory=True, ranks="2").count == 2
    assert machine.plan(vllm_restart_interval=0, ranks=4, device="cpu").count == 4


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        (
            {"weight_bridge_mode": "lora_only"},
            "--weight-bridge-mode lora_only trains in one process",
        ),
        ({}, "a trainer that restarts vLLM on checkpoints"),
        ({"vllm_restart_interval": 2}, "a trainer that restarts vLLM on checkpoints"),
    ],
)
def test_a_mode_of_one_process_names_itself(
    machine: Machine, caplog: pytest.LogCaptureFixture, mode: dict[str, object], named: str
) -> None:
    machine.gpus = ("a", "b")
    assert machine.plan(**mode).count == 1
    assert f"[Ranks] This trainer uses one of the 2 GPUs that it sees: {named}" in caplog.text
    with pytest.raises(ConfigError, match=f"^--ranks 2: {named}.*; leave --ranks out$"):
        machine.plan(**mode, ranks=2)
    assert machine.questions == 0


def test_a_single_copy_has_as_many_ranks_as_vllm(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    single = SHARED | {"single_copy": True}
    machine.info = server_info(2)
    plan = machine.plan(**single)
    assert (plan.count, plan.flags) == (2, ("--ranks", "2", "--single-copy"))
    assert (
        "[Ranks] Starting 2 ranks, one for each of vLLM's at http://localhost:9001" in caplog.text
    )
    machine.info, machine.gpus = server_info(2, ("a", "b")), ("a", "b")
    assert machine.plan(**single).count == 2
    assert machine.plan(**single, ranks=2).count == 2
    machine.info = server_info(1)
    assert machine.plan(**single, device="cpu").count == 1


@pytest.mark.parametrize(
    ("gpus", "values", "told"),
    [
        (
            ("a",),
            {},
            "vLLM's 2 ranks, and this trainer sees 1 GPU.*: set CUDA_VISIBLE_DEVICES as for vLLM",
        ),
        (("a", "b"), {"ranks": 1}, "vLLM's 2 ranks, and --ranks is 1: leave --ranks out"),
        (("a", "b", "c"), {"ranks": 3}, "vLLM's 2 ranks, and --ranks is 3: leave --ranks out"),
    ],
)
def test_a_single_copy_with_other_ranks_is_refused_before_anything_starts(
    machine: Machine, gpus: tuple[str, ...], values: dict[str, object], told: str
) -> None:
    machine.gpus, machine.info = gpus, server_info(2, ("a", "b"))
    with pytest.raises(BridgeError, match=told) as refused:
        machine.plan(**SHARED, single_copy=True, **values)
    assert "\n" not in str(refused.value)


def test_a_single_copy_of_replicas_is_refused(machine: Machine) -> None:
    machine.info = server_info(1, replicas=2)
    with pytest.raises(BridgeError, match="2 replicas"):
        machine.plan(**SHARED, single_copy=True)


def test_a_trainer_of_one_rank_computes_on_vllms_gpu(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus, machine.info = ("a", "b"), server_info(1, ("b",))
    plan = machine.plan(**SHARED, single_copy=True)
    assert (plan.count, plan.config.device) == (1, "cuda:1")
    assert (
        "one of the 2 GPUs that it sees: a single copy has one rank for each of vLLM's"
        in caplog.text
    )
    plan = machine.plan(**SHARED)
    assert (plan.count, plan.config.device) == (1, "cuda:1"), "the same where the trainer chooses"


def test_without_a_flag_the_servers_gpus_decide(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus, machine.info = ("a", "b"), server_info(2, ("a", "b"))
    plan = machine.plan(**SHARED)
    assert (plan.count, plan.flags) == (2, ("--ranks", "2", "--single-copy"))
    assert "Single copy: the trainer sees all of vLLM's GPUs" in caplog.text
    machine.info = server_info(2, ("c", "d"))
    plan = machine.plan(**SHARED)
    assert (plan.count, plan.flags) == (2, ("--ranks", "2", "--use-shared-memory"))
    assert "Broadcast: the trainer is on other GPUs than vLLM" in caplog.text
    machine.info = server_info(4, ("a", "b", "c", "d"))
    assert machine.plan(**SHARED).flags[-1] == "--use-shared-memory"
    assert "Broadcast: vLLM has 4 ranks and this trainer has 2" in caplog.text
    machine.info = server_info(2, ("a", "b"), dtype="float16")
    assert machine.plan(**SHARED).flags[-1] == "--use-shared-memory", (
        "no gradient is taken in float16"
    )


@pytest.mark.parametrize(("ranks", "of_server"), [(1, 2), (1, 4), (2, 4), (4, 2)])
def test_a_single_copy_of_other_ranks_than_vllms_is_refused_with_what_would_do(
    machine: Machine, ranks: int, of_server: int
) -> None:
    """Also of ranks that could share the parts of vLLM's sums."""
    machine.gpus = ("a", "b", "c", "d")
    machine.info = server_info(of_server, machine.gpus[:of_server])
    exact = SHARED | {"deterministic": True, "ranks": ranks}
    with pytest.raises(BridgeError) as refused:
        machine.plan(**exact, single_copy=True)
    assert str(refused.value) == (
        f"single copy needs one trainer rank for each of vLLM's {of_server} ranks, and --ranks is "
        f"{ranks}: leave --ranks out, or train with --use-shared-memory (broadcast), for "
        "any number of ranks"
    )
    assert machine.plan(**exact, use_shared_memory=True).count == ranks


def test_without_a_flag_another_number_of_ranks_than_vllms_broadcasts(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus, machine.info = ("a", "b"), server_info(1, ("a",))
    plan = machine.plan(**SHARED, ranks=2)
    assert (plan.count, plan.flags) == (2, ("--ranks", "2", "--use-shared-memory"))
    assert "Broadcast: vLLM has 1 rank(s) and --ranks is 2" in caplog.text
    machine.info = server_info(2, ("a", "b"))
    plan = machine.plan(**SHARED, ranks=1)
    assert (plan.count, plan.config.use_shared_memory) == (1, True), (
        "the choice is made, and logged, once"
    )
    machine.info = server_info(1, ("b",))
    assert machine.plan(**SHARED).config.single_copy


def test_several_updates_of_a_batch_are_broadcast(machine: Machine) -> None:
    machine.gpus, machine.info = ("a", "b"), server_info(2, ("a", "b"))
    assert machine.plan(**SHARED, ppo_epochs=2).count == 2
    assert machine.questions == 0


def test_ranks_that_share_experts_are_no_single_copy(machine: Machine, tmp_path: Path) -> None:
    mixture.main(["--output", str(tmp_path)])
    machine.gpus, machine.info = ("a", "b"), server_info(2, ("a", "b"))
    options = SHARED | {"model_name": str(tmp_path)}
    assert machine.plan(**options, expert_parallel=2).count == 2
    assert machine.questions == 0
    with pytest.raises(ConfigError, match="--expert-parallel 4 does not divide the 2"):
        machine.plan(**options, expert_parallel=4)


def test_a_launched_rank_starts_none(machine: Machine) -> None:
    machine.gpus = ("a", "b")
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    assert machine.plan(launched).count == 1
    assert machine.plan(launched, ranks=2).count == 1
    assert machine.plan({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).count == 1
    with pytest.raises(ConfigError, match=r"--ranks 3, but the launcher started 2 rank\(s\)"):
        machine.plan(launched, ranks=3)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"ranks": 3}, r"--ranks 3, but this trainer sees 2 GPU\(s\)"),
        ({"ranks": 2, "device": "cuda:1"}, "--ranks 2 and --device cuda:1 exclude each other"),
    ],
)
def test_ranks_that_cannot_be_are_refused(
    machine: Machine, values: dict[str, object], told: str
) -> None:
    machine.gpus = ("a", "b")
    with pytest.raises(ConfigError, match=told):
        machine.plan(**SHARED, use_shared_memory=True, **values)


def test_one_process_prefers_a_single_copy_of_one_rank_alone() -> None:
    assert prefers_single_copy(server_info(2, ("a", "b"))) == (
        False,
        "vLLM has 2 ranks and this trainer is one process",
    )
    single, reason = prefers_single_copy(server_info(1, ("a",), dtype="float16"))
    assert not single
    assert "float16" in reason
