"""The content of a parameter server, its refusals and answers, without processes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.command_line import parse_section
from example_trainer.errors import BridgeError, ConfigError, ModelError
from example_trainer.parameter_server import serving
from example_trainer.parameter_server.handing import Order
from example_trainer.parameter_server.held import HeldCopy, HeldWeights, held_manifest
from example_trainer.parameter_server.options import ParameterServerOptions, Share
from example_trainer.parameter_server.receiving import ReceivingServer
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.broadcast import require_fresh_enough
from tests.fleet_server import CONFIG
from tests.geometries import config_of
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.server.access import Door
from vllm_patching.server.state import Weights
from vllm_patching.weights.families import Geometry

CPU = torch.device("cpu")


@pytest.mark.parametrize("config", [CONFIG, config_of("Qwen3Moe", 1, 8, 6, 4, 2, 2, 70)])
def test_the_shards_of_a_parameter_are_the_rows_that_the_senders_expect(
    config: dict[str, Any],
) -> None:
    for size in (1, 2, 3, 5, 16):
        geometry = Geometry.from_config(config)
        manifests = [held_manifest(geometry, torch.float32, CPU, r, size) for r in range(size)]
        for entries in zip(*(manifest.entries for manifest in manifests), strict=True):
            full = torch.arange(entries[0].shard.full_shape[0])
            held = [
                full[s.source_start : s.source_start + s.length]
                for entry in entries
                for s in entry.shard.slices
            ]
            assert [part.tolist() for part in held] == [
                part.tolist() for part in full.split(-(-len(full) // size))
            ]


def test_a_copy_that_has_changed_in_memory_is_found_out() -> None:
    copy = HeldCopy(
        held_manifest(Geometry.from_config(CONFIG), torch.float32, torch.device("cpu")),
        torch.device("cpu"),
    )
    copy.checksum = weights_checksum(copy.slices)
    assert copy.is_sound()
    copy.tensors["model.norm.weight"][3] = 1e-30
    assert not copy.is_sound()


@given(st.lists(st.sampled_from(["push", "spoilt push", "pin", "unpin"]), max_size=30))
def test_what_is_pinned_stays_and_the_newest_whole_version_is_what_is_there(
    steps: list[str],
) -> None:
    """By a model of two places: a push never touches what is pinned, nor, unless it must, what is
    newest.
    """
    held = HeldWeights.__new__(HeldWeights)
    held.copies = [
        HeldCopy(held_manifest(Geometry.from_config(CONFIG), torch.float32, CPU), CPU)
        for _ in range(2)
    ]
    held._newest = held._pinned = None
    held._lockstep_rank, version = 0, 0
    held._lockstep_updater = SimpleNamespace(receive_into=lambda number, version: None)  # type: ignore[assignment]
    whole: list[int] = []  # versions that are, oldest first
    pinned: int | None = None
    for step in steps:
        if step.endswith("push"):
            version += 1
            held.lockstep_receive(version)
            keep = pinned if pinned is not None else (whole[-1] if whole else None)
            whole = [] if keep is None else [keep]
            assert held.held_newest()["version"] == keep
            if step == "push":
                held._lockstep_updater.status = SimpleNamespace(
                    version=version, checksum=str(version)
                )  # type: ignore[misc]
                held.held_accept(5)
                whole.append(version)
        elif step == "pin":
            pinned = held.held_pin()["version"]
        else:
            held.held_unpin()
            pinned = None
        newest = whole[-1] if whole else None
        assert (held.held_newest()["version"], held.held_newest()["checksum"]) == (
            newest,
            "" if newest is None else str(newest),
        )
        if pinned is not None:
            assert held.pinned.version == pinned


def test_weights_are_handed_out_under_their_own_epoch() -> None:
    """Another trainer has pushed the same version since the order was made."""
    asked = []

    def ask(method: Any, *args: Any) -> list[dict[str, Any]]:
        asked.append(method.__name__)
        return [{"tp_rank": 0, "version": 3, "weight_epoch": 8, "checksum": "c"}]

    server = SimpleNamespace(check=lambda: None, bridge=SimpleNamespace(held=None), ask=ask)
    handing = SimpleNamespace(due=lambda held: Order(Weights(7, 3), True), carry_out=None)
    serving.hand_out(server, handing)  # type: ignore[arg-type]
    assert asked == ["held_pin", "held_unpin"]


def test_what_does_not_fit_is_one_line_with_the_bytes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "free_host_memory", lambda: (1 << 20, 1 << 40))
    options = parse_section(
        ParameterServerOptions, "x", ["--model-name", str(model), "--device", "cpu"]
    )
    with pytest.raises(
        serving.HeldMemoryShortage,
        match=r"needs 0\.\d\d GiB on cpu \(2 copies of .* 0\.00 GiB are free",
    ):
        serving.serve(options, StopSignal())


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("no JSON", "cannot read"),
        (
            '{"model_type": "gpt2"}',
            "has no 'architectures', which names the class (model_type 'gpt2')",
        ),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "has no 'hidden_size'"),
    ],
)
def test_a_config_that_lacks_something_is_named(tmp_path: Path, config: str, told: str) -> None:
    (tmp_path / "config.json").write_text(config)
    options = parse_section(
        ParameterServerOptions, "x", ["--model-name", str(tmp_path), "--device", "cpu"]
    )
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "config.json"))) as caught:
        serving.serve(options, StopSignal())
    assert told in str(caught.value)


def test_one_that_does_not_listen_any_more_says_what_to_do(tmp_path: Path) -> None:
    server = ReceivingServer(
        lambda method, args: [], "tiny", "float32", 1.0, tmp_path, "127.0.0.1", 9101, Door(), {}
    )
    with pytest.raises(
        BridgeError, match=r"not listen on port 9101 any more: its thread has ended; start it again"
    ):
        server.check()


def test_a_trainer_does_not_wait_for_rollouts_that_never_come() -> None:
    require_fresh_enough("http://h:1", 3, 2, 3)
    require_fresh_enough("http://h:1", 3, 2, None)
    with pytest.raises(ConfigError, match=r"up to 3 versions behind\. A --max-staleness of 2"):
        require_fresh_enough("http://h:1", 3, 2, 2)


@given(
    st.lists(st.integers(1, 999), unique=True), st.lists(st.integers(1000, 1999)), st.integers(1, 6)
)
def test_every_server_is_one_parameter_servers(
    named: list[int], others: list[int], count: int
) -> None:
    shares = [
        Share(number, count, [f"http://h:{port}" for port in named]) for number in range(count)
    ]
    for port in (*named, *others):
        assert sum(share.has(f"http://h:{port}") for share in shares) == 1
    sizes = [len(share.named()) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("arguments", "key", "address"),
    [
        ([], "", "127.0.0.1"),
        ([], "s3cret", "0.0.0.0"),
        (["--host", "10.0.0.7"], "s3cret", "10.0.0.7"),
    ],
)
def test_without_a_key_other_machines_cannot_push(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], key: str, address: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    options = parse_section(
        ParameterServerOptions, "parameter server", ["--model-name", "m", *arguments]
    )
    assert options.address == address
