"""A trainer of several ranks and a vLLM of two: every rank's weights are the trainer's after each
step.

A single copy is started as a person types it: the trainer asks the server, and starts its ranks
itself. The ranks of a broadcast are started by torchrun.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.launcher import roles
from example_trainer.models.hf_checkpoint import load_model
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import made_up_group
from tests.e2e.conftest import VllmServer, start_vllm, trainer_command
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import Manifest, flat_layout, source_view

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STEPS = 3
TOLERANCE = 2e-5
"""Largest difference of two float32 logprobs that were computed by different kernels; training
changes them by far more.
"""


@pytest.fixture(scope="module")
def two_ranks(
    module_processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmServer:
    """A server of tensor-parallel degree 2, whose ranks share one key/value head and split an odd
    vocabulary.
    """
    flags = ("--tensor-parallel-size", "2", "--bridge-timeout", "60")
    return start_vllm(
        module_processes, free_port, tiny_model, tmp_path_factory.mktemp("vllm"), flags=flags
    )


@pytest.mark.parametrize(("flag", "ranks"), [("--single-copy", 2), ("--use-shared-memory", 3)])
def test_three_steps_of_a_trainer_of_several_ranks(
    flag: str,
    ranks: int,
    two_ranks: VllmServer,
    processes: Processes,
    free_port: Callable[[], int],
    tmp_path: Path,
) -> None:
    port = free_port()
    processes.start_service(port)
    for number in range(STEPS):
        httpx.post(
            f"http://127.0.0.1:{port}/scored_data", json=made_up_group(number), timeout=120
        ).raise_for_status()
    command = ranks_command(flag, ranks, two_ranks, port, free_port(), tmp_path)
    trainer = processes.start(
        "trainer",
        command,
        {"PYTHONPATH": str(ROOT)},
        directory=tmp_path,
    )
    text = processes.finish(trainer, seconds=240)
    assert text.count(f"Training complete: {STEPS} steps") == 1, "rank 0 logs for all"
    started = (
        f"[Ranks] Starting 2 ranks, one for each of vLLM's at http://localhost:{two_ranks.port}"
    )
    assert (started in text) == (flag == "--single-copy")

    trained = load_model(str(tmp_path / "checkpoints" / f"step_{STEPS}"), torch.float32)
    parameters = dict(trained.named_parameters())
    info = httpx.get(f"{two_ranks.url}/bridge/info", timeout=120).json()
    layouts = [flat_layout(Manifest.from_json(rank))[0] for rank in info["ranks"]]
    expected = [
        weights_checksum((item.name, source_view(item, parameters[item.name])) for item in layout)
        for layout in layouts
    ]
    state = two_ranks.state()
    assert (state["state"], state["weight_version"]) == ("serving", STEPS)
    assert state["mode"] == flag.removeprefix("--").replace("-", "_").replace(
        "use_shared_memory", "broadcast"
    )
    assert state["checksums"] == expected
    rows = [
        json.loads(line)
        for line in (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert all(row["params_mapped"] == row["params_total"] == len(parameters) for row in rows)
    assert len({row["checksum"] for row in rows}) == STEPS
    assert rows[-1]["checksum"] == expected[0]
    assert all((row["bytes_moved"] == 0) == (flag == "--single-copy") for row in rows)

    answer = two_ranks.generate([72, 105], n=2, max_tokens=8, seed=3, ignore_eos=True)
    expect_sampled_from(trained, load_model(str(two_ranks.model), torch.float32), answer)


def ranks_command(
    flag: str, ranks: int, server: VllmServer, port: int, master_port: int, folder: Path
) -> list[str]:
    """The command of a trainer that starts its ranks itself, or of torchrun that starts them."""
    torchrun = [
        "-m",
        "tests.forked_torchrun",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(master_port),
    ]
    launcher = ["-u"] if flag == "--single-copy" else torchrun
    bridge = "single-copy" if flag == "--single-copy" else "broadcast"
    _, _, *words = roles.anywhere(
        trainer_command(
            server.model,
            f"http://127.0.0.1:{port}",
            folder,
            bridge=bridge,
            vllm_port=server.port,
            lr=1e-3,
            training_steps=STEPS,
            batch_size=1,
            gradient_accumulation_steps=4,
            seq_len=64,
            num_threads=1,
            rank_timeout=60,
        )
    )
    return [sys.executable, *launcher, *words]


def expect_sampled_from(trained: Any, start: Any, answer: dict[str, Any]) -> None:
    """Expect the trained model, and not the first one, to give an answer's logprobs."""
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        served = torch.tensor(
            [row[str(token)] for row, token in zip(logprobs, tokens, strict=True)]
        )
        for model, same in ((trained, True), (start, False)):
            with torch.no_grad():
                table = model.logits(torch.tensor([[72, 105, *tokens]]))[0, 1:-1].log_softmax(-1)
            difference = float(
                (table.gather(1, torch.tensor(tokens)[:, None])[:, 0] - served).abs().max()
            )
            assert (difference < TOLERANCE) == same
