"""The harness of the benchmarks without a server. Tested are command lines, commit and date,
updates under load, the judgement of an answer, and the HTTP of vLLM's own engine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import measured as module
from bench import weight_sync
from bench.gpu.processes import BenchError
from bench.gpu.runs import LoadedSitting
from bench.gpu.trainer import BenchTrainer
from bench.gpu.vllm_engine_trainer import EngineTrainer
from bench.measured import COMMIT_VARIABLE, commit, measured
from tests.gpu import check_parity_matrix
from tests.http_server import HttpServer


class Peer:
    """Notes what a worker is asked, and answers with what it was given."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[tuple[str, dict[str, Any]]]()

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        self.asked.append((command, arguments))
        return self.answers[command]


@pytest.fixture
def sitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedSitting:
    args = weight_sync.parse(["--output", str(tmp_path), "--tiny", "--device", "cpu"])
    args.ramp = 0.0
    load = Peer(start={}, stop={"finished": 3, "streams": [[0.0, 1.0, 2.5, 3.0]], "failures": []})
    monkeypatch.setattr(LoadedSitting, "worker", lambda self, name, module, **options: load)
    return LoadedSitting(args, tmp_path, ExitStack())


def test_tiny_shrinks_every_part(tmp_path: Path) -> None:
    args = weight_sync.parse(["--output", str(tmp_path), "--tiny", "--device", "cpu"])
    assert (args.shape, args.concurrency, args.updates, args.ramp) == ("tiny", [4], 3, 0.5)
    assert (args.name, args.servers) == ("weight_sync_tiny", [1, 2])


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--crossed", "--tp", "2"], "--crossed needs"),
        (["--crossed", "--tp", "2", "--trainer-ranks", "2"], "--crossed needs"),
        (["--crossed", "--parts", "bridge"], "--crossed needs"),
        (["--parts", "lora", "bridge"], "give single_copy or lora alone"),
    ],
)
def test_combinations_that_cannot_run_are_refused(
    arguments: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        weight_sync.parse(["--output", "x", *arguments])
    assert pattern in capsys.readouterr().err


def row(median: float) -> dict[str, Any]:
    """Return the results of updates, all as long."""
    spread = {"median": median, "p90": median, "max": median, "n": 3}
    figures = ("whole_update_ms", "halted_ms", "largest_gap_per_update_ms")
    return {"idle": {"updates": 3, **dict.fromkeys(figures, spread)}}


@given(st.dictionaries(st.sampled_from(["2", "4", "8"]), st.floats(1.0, 1e4)), st.floats(1.0, 1e4))
def test_every_number_of_servers_is_set_against_one(others: dict[str, float], one: float) -> None:
    rows = {number: row(median) for number, median in others.items()}
    assert weight_sync.times_one(rows) == {}
    ratios = weight_sync.times_one({"1": row(one), **rows})
    assert ratios["1"] == 1.0
    assert ratios.keys() == {"1", *others}


def test_updates_under_load_are_set_against_the_stream_of_tokens(sitting: LoadedSitting) -> None:
    update = {"start": 1.2, "end": 1.4}
    trainer = Peer(sync=[update])
    server: Any = SimpleNamespace(port=5, model="m")
    found = sitting.under_load(
        server, trainer, 65, summarise=lambda rows: {"rows": rows}, first_steps=True
    )  # type: ignore[arg-type]
    assert found["rows"] == [update]
    assert found["concurrency"] == 65
    assert found["largest_gap_per_update_ms"]["max"] == 1500.0
    assert trainer.asked == [
        ("sync", {"count": 3, "interval": 0.4, "loaded": True})
    ]  # twice as long above 64 requests
    started: Any = sitting.load.asked[0]  # type: ignore[attr-defined]
    assert (started[1]["observers"], started[1]["max_tokens"]) == (16, 24)


def test_a_load_without_an_answer_is_an_error(sitting: LoadedSitting) -> None:
    sitting.load.answers["stop"] = {"finished": 0, "streams": [[]], "failures": ["refused"]}  # type: ignore[attr-defined]
    with pytest.raises(BenchError, match="refused"):
        sitting.warm_up(SimpleNamespace(port=5, model="m"), 4)  # type: ignore[arg-type]


def test_a_server_with_other_weights_is_an_error(sitting: LoadedSitting) -> None:
    good = {"checksums_equal": True, "new_not_old": True, "served": 3, "version": 3}
    assert sitting.check(Peer(check=good)) == good  # type: ignore[arg-type]
    for wrong in ({"checksums_equal": False}, {"new_not_old": False}, {"served": 2}):
        with pytest.raises(BenchError, match="not the ones that were sent"):
            sitting.check(Peer(check=good | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [{}, {"spare": True}, {"drawn": True}], ids=str)
def test_an_answer_belongs_to_the_weights_that_gave_it(kept: dict[str, bool]) -> None:
    trainer = BenchTrainer("tiny-mixture", 1, "cpu", timeout=1.0)
    trainer.load(**kept)
    assert any(trainer.sets) != kept.get("drawn", False)
    assert trainer.model is not None
    prompt, sampled = trainer._prompt(0), torch.randint(3, 1000, (2, 6))
    ids = torch.cat((torch.tensor([prompt] * 2), sampled), -1)
    with torch.no_grad():
        logprobs = trainer.model.logits(ids)[:, len(prompt) - 1 : -1].float().log_softmax(-1)
    held = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    answer = {
        "token_ids": sampled.tolist(),
        "token_logprobs": logprobs.gather(-1, sampled[..., None])[..., 0].tolist(),
    }
    found = trainer._compared(prompt, answer)
    assert found["new_not_old"]
    assert found["mean_logprob_difference_to_new_weights"] < 1e-4
    assert all(
        torch.equal(held[name], parameter) for name, parameter in trainer.model.named_parameters()
    )
    trainer.write(1)
    assert not trainer._compared(prompt, answer)["new_not_old"]


def test_the_parity_table_counts_deterministic_cells_alone() -> None:
    cell = {
        "tokens": 10,
        "mismatched": 0,
        "preemptions": 0,
        "prefix_cache_hits": 1,
        "max_difference": 0.0,
        "kl": 0.0,
    }
    first, *_, control = check_parity_matrix.SERVERS
    data = {
        first: {
            "ready": {"vllm": 1.0},
            "single_copy": {"load": {}, "8 at a time": cell},
            "broadcast": {"update 1": [1]},
        }
    }
    data |= {control: {"single_copy": {"64 at a time": cell | {"mismatched": 4}}}}
    assert check_parity_matrix.total(data) == {"tokens": 10, "mismatched": 0}
    assert "control: mode off" in check_parity_matrix.report(data)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the code under test thinks that it lies."""
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def test_the_commit_is_gits_and_says_whether_files_differ_from_it(folder: Path) -> None:
    git(folder, "init", "-q")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "-qm", "first")
    head = git(folder, "rev-parse", "--short=12", "HEAD")
    assert commit() == head
    (folder / "results.json").write_text("{}")  # the output of a run does not change the code
    assert commit() == head
    (folder / "file").write_text("2")
    assert commit() == head + "+"


def test_a_variable_names_the_commit_where_there_is_no_git(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit() == "unknown"
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert commit() == "abc123"


def test_rows_of_one_process_have_the_run_in_common() -> None:
    first, second = measured(), measured()
    assert first["run"] == second["run"] <= first["date"] <= second["date"]
    assert datetime.strptime(second["date"], "%Y-%m-%d %H:%M").replace(tzinfo=UTC) <= datetime.now(
        UTC
    )


@pytest.fixture
def server() -> Iterator[HttpServer]:
    broken = {"/broken": (500, None)}
    with HttpServer(lambda request: broken.get(request.path, (200, None)), keep_alive=True) as one:
        yield one


def test_all_calls_to_a_server_share_one_connection(server: HttpServer) -> None:
    trainer = EngineTrainer("tiny", server.port, "cpu", timeout=60)
    for _ in range(3):
        trainer._ask_all("/pause", params={"mode": "keep"})()
        trainer._ask_all("/update_weights", json={"update_info": {}})()
        trainer._ask_all("/resume")()
    paths = [request.path for request in server.requests]
    assert paths == ["/pause?mode=keep", "/update_weights", "/resume"] * 3
    assert len({request.client_port for request in server.requests}) == 1


def test_a_call_in_the_background_raises_where_it_is_waited_for(server: HttpServer) -> None:
    wait = EngineTrainer("tiny", server.port, "cpu", timeout=60)._ask_all("/broken")
    with pytest.raises(Exception, match="500"):
        wait()
