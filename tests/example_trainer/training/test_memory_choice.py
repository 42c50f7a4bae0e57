"""The choice of where masters and moments are and whether layers are recomputed: order, flags,
ranks and the logged line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.command_line import parse_config
from example_trainer.config import TrainerConfig
from example_trainer.parallel.ranks import Ranks
from example_trainer.training import memory_choice
from example_trainer.training.memory_choice import (
    BUS_BYTES_PER_SECOND,
    MemoryChoice,
    candidates,
    choice_line,
    choose_memory,
    first_that_fits,
    offload_seconds,
)
from example_trainer.training.memory_plan import (
    PLANNED_SHARE,
    MemoryRequest,
    MemoryShortage,
    Room,
    plan_memory,
)
from example_trainer.weight_bridge.base import NoBridge
from tests.example_trainer.training.memory_cases import qwen_7b, qwen_14b, request

ROOT = Path(__file__).resolve().parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


def config(*flags: str) -> TrainerConfig:
    return parse_config(["--model-name", "m", *flags])


def training(*flags: str, **changes: Any) -> MemoryRequest:
    """A 14B model, as a broadcasting trainer has it on a GPU."""
    options = {
        "geometry": qwen_14b(),
        "seq_len": 2048,
        "table": "fast",
        "share_prefixes": True,
        "workspace": GIB,
        "logprob_chunk": 4096,
    }
    return request(**(options | {"optimizer": config(*flags).optimizer} | changes))


def choose(room: Room, *flags: str, **changes: Any) -> MemoryRequest | None:
    ways = candidates(training(*flags, **changes), config(*flags), room)
    number = first_that_fits([[(room.holds(way, PLANNED_SHARE), room.holds(way)) for way in ways]])
    return None if number is None else ways[number]


def card(free: float, host: float, ranks: int = 1) -> Room:
    return Room(GPU, int(free * GIB), int(free * GIB), int(host * GIB), ranks)


@pytest.mark.parametrize(
    ("room", "flags", "ranks", "expected"),
    [
        (card(139, 230), [], 1, (True, False)),
        (card(96, 230), [], 1, (True, True)),
        (card(300, 230), [], 1, (False, False)),
        (card(139, 120), [], 1, None),
        (card(139, 120), ["--optimizer", "adamw-8bit"], 1, (True, False)),
        (card(139, 230), ["--optimizer-offload", "off"], 1, None),
        (card(300, 230), ["--optimizer-offload"], 1, (True, False)),
        (card(300, 230), ["--gradient-checkpointing"], 1, (False, True)),
        (card(96, 230), ["--no-gradient-checkpointing"], 1, None),
        (card(139, 120), ["--optimizer-offload", "auto"], 4, (False, False)),
        (
            card(300, 0),
            ["--deterministic", "--weight-bridge-mode", "shared_vllm"],
            1,
            (False, False),
        ),
    ],
)
def test_the_first_way_that_fits_is_taken(
    room: Room, flags: list[str], ranks: int, expected: tuple[bool, bool] | None
) -> None:
    chosen = choose(replace(room, ranks_here=ranks), *flags, world_size=ranks)
    assert (None if chosen is None else (chosen.offload, chosen.gradient_checkpointing)) == expected
    assert chosen is None or chosen.optimizer == config(*flags).optimizer


@settings(max_examples=40)
@given(free=st.integers(60, 320), host=st.integers(20, 300), ranks=st.sampled_from([1, 2, 4]))
def test_nothing_cheaper_would_fit_and_what_is_chosen_does(
    free: int, host: int, ranks: int
) -> None:
    room = card(free, host, ranks)
    ways = candidates(training(world_size=ranks), config(), room)
    assert [(way.offload, way.gradient_checkpointing) for way in ways] == [
        (False, False), (True, False), (False, True), (True, True),
    ]  # fmt: skip
    chosen = choose(room, world_size=ranks)
    if chosen is None:
        assert not any(room.holds(way) for way in ways)
        return
    assert room.holds(chosen)
    roomy = [way for way in ways if room.holds(way, PLANNED_SHARE)]
    assert chosen == (roomy or [way for way in ways if room.holds(way)])[0]


def test_a_tight_way_comes_after_one_that_leaves_some_memory_free() -> None:
    assert first_that_fits([[(False, True), (True, True)]]) == 1
    assert first_that_fits([[(False, True), (False, True)]]) == 0
    assert first_that_fits([[(False, False), (False, False)]]) is None


def test_ranks_take_the_same_way() -> None:
    """The second rank has less host memory, the first less of its GPU."""
    first, second = (
        [(False, False), (True, True), (False, False)],
        [(True, True), (False, False), (True, True)],
    )
    assert first_that_fits([first, second]) is None
    assert first_that_fits([[*first, (True, True)], [*second, (False, True)]]) == 3


def test_adapters_and_cpus_leave_nothing_to_choose() -> None:
    asked = training(lora=(16, ("q_proj",)))
    assert [
        way.offload
        for way in candidates(asked, config("--weight-bridge-mode", "lora_only"), card(100, 100))
    ] == [False] * 2
    on_cpu = replace(card(100, 100), device=CPU)
    assert [
        (way.offload, way.gradient_checkpointing)
        for way in candidates(training(), config(), on_cpu)
    ] == [(False, False)]
    assert [
        way.offload for way in candidates(training(), config("--optimizer-offload"), on_cpu)
    ] == [True]


@pytest.mark.parametrize(
    ("flags", "changes", "free_memory_decides"),
    [
        ([], {"world_size": 2}, True),
        (["--deterministic"], {"table": "invariant", "share_prefixes": False}, True),
        (["--deterministic", "--share-prefixes"], {"table": "invariant"}, False),
        (
            ["--deterministic"],
            {"table": "invariant", "share_prefixes": False, "world_size": 2},
            False,
        ),
    ],
)
def test_free_memory_decides_no_bits_of_a_deterministic_run(
    flags: list[str], changes: dict[str, Any], free_memory_decides: bool
) -> None:
    options = [*flags, "--weight-bridge-mode", "shared_vllm"]
    tokens = {
        way.tokens_per_microbatch
        for free in (100, 300)
        for way in candidates(training(*options, **changes), config(*options), card(free, 300))
    }
    assert (len(tokens) > 1) == free_memory_decides
    if not free_memory_decides:
        assert tokens == {training(**changes).tokens_per_microbatch}


def test_one_line_names_the_choice_and_its_cost() -> None:
    room = card(139, 230)
    chosen = choose(room)
    assert chosen is not None
    line = choice_line(chosen, candidates(training(), config(), room)[0], room)
    needed = plan_memory(chosen).total / GIB
    assert line == (
        "Memory plan: adamw, masters and moments in host memory, layers kept; microbatches of at most 4096 tokens; "
        f"{needed:.2f} of 139.00 GiB on cuda:0, 165.07 of 230.00 GiB of host memory; each update takes about 4.7 s longer; "
        "chosen because 264.54 GiB would be needed otherwise"
    )
    plain = training(geometry=qwen_7b())
    assert "chosen because" not in choice_line(plain, plain, card(180, 0))


def test_the_rate_over_the_bus_is_that_of_the_measurement() -> None:
    case = json.loads((ROOT / "bench/results/trainer_speed.json").read_text())["cases"][
        "8B, one GPU, offloaded"
    ]
    seconds = case["step"]["optimizer_seconds"] + case["step"]["write_weights_seconds"]
    assert 16 * case["parameters"] / seconds == pytest.approx(BUS_BYTES_PER_SECOND, rel=0.05)
    asked = training(offload=True)
    assert offload_seconds(asked) == pytest.approx(16 * asked.trained / BUS_BYTES_PER_SECOND)


def test_the_options_get_the_choice() -> None:
    chosen = MemoryChoice(offload=True, gradient_checkpointing=False, tokens_per_microbatch=5)
    applied = chosen.applied_to(config("--optimizer", "adamw-8bit"))
    assert (applied.optimizer_offload, applied.gradient_checkpointing, applied.optimizer) == (
        True,
        False,
        "adamw-8bit",
    )
    assert applied.shareable["optimizer_offload"] is True


def test_the_trainer_plans_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder without weights will do: only its config.json is read."""
    (tmp_path / "config.json").write_text(
        (ROOT / "assets" / "starter_model" / "config.json").read_text()
    )
    caplog.set_level("INFO")
    asked = TrainerConfig(model_name=str(tmp_path))
    assert choose_memory(asked, NoBridge(), torch.float32, CPU).tokens_per_microbatch == 4096
    assert "GiB  float32 masters" in caplog.text
    assert caplog.text.count("Memory plan: adamw, masters and moments on cpu, layers kept; ") == 1
    monkeypatch.setattr(memory_choice, "free_memory", lambda device: (10_000_000, 20_000_000))
    with pytest.raises(MemoryShortage, match=r"0\.01 of 0\.02 GiB are free on cpu"):
        choose_memory(asked, NoBridge(), torch.float32, CPU)
    choose_memory(
        asked.model_copy(update={"skip_memory_check": True}), NoBridge(), torch.float32, CPU
    )
    assert "Going on because of --skip-memory-check" in caplog.text


class SecondRank(Ranks):
    """Rank 0 of two, beside one that answers the same or has no way at all."""

    def __init__(self, other: list[list[Any]]) -> None:
        super().__init__()
        self._other = other

    def gather(
        self, value: Any, what: str = "an object", timeout: float | None = None
    ) -> list[Any]:
        return [value, self._other if isinstance(value, list) else value]


def test_a_rank_that_has_room_is_refused_with_the_others_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        (ROOT / "assets" / "starter_model" / "config.json").read_text()
    )
    asked = TrainerConfig(model_name=str(tmp_path))
    assert (
        choose_memory(
            asked, NoBridge(), torch.float32, CPU, SecondRank([[True, True, 512]])
        ).tokens_per_microbatch
        == 512
    )
    with pytest.raises(MemoryShortage, match="no way to train fits on every rank"):
        choose_memory(asked, NoBridge(), torch.float32, CPU, SecondRank([[False, False, 512]]))
