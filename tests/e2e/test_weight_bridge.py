"""The weight bridge with the real vLLM: every weight arrives, at once, and what goes wrong leaves
the old version serving.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.base import LeaseLost
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.logprobs_mode import check_logprobs
from example_trainer.weight_bridge.server import BridgeServer, shapes_of
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import (
    TOLERANCE,
    checksums,
    joined,
    largest_difference,
    new_masters,
    new_weights,
    refuses_to_sample,
    require_timeline,
    served_logprobs,
    stalled_of,
    trainer_logprobs,
    wait_for_state,
)
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, make_tiny_model
from tests.light_servers import SOON

pytestmark = pytest.mark.e2e

KINDS = ("direct", "overlapped", "single_copy")
"""The two transfers of a broadcast, and the bridge that transfers nothing."""


def wait_until_generating(server: VllmServer, asking: threading.Thread) -> None:
    """Wait until a request runs, or until the request of `asking` has been answered."""
    deadline = time.monotonic() + SOON
    while asking.is_alive() and not re.search(
        r"^vllm:num_requests_running\S* [1-9]",
        httpx.get(f"{server.url}/metrics", timeout=120).text,
        re.MULTILINE,
    ):
        assert time.monotonic() < deadline, "the request never ran"


def test_generate_equals_the_trainers_forward_pass(server: VllmServer) -> None:
    assert largest_difference(server, load_model(str(server.model), torch.float32)) < TOLERANCE


def test_a_server_says_that_it_is_not_deterministic(server: VllmServer) -> None:
    answer = httpx.get(f"{server.url}/deterministic", timeout=120)
    assert answer.status_code == 404
    assert "--deterministic" in answer.json()["error"]


def test_a_server_says_which_logprobs_it_hands_out(server: VllmServer) -> None:
    """The answer is true: they are of the distribution that was sampled from, greedy answers' of
    the model's own.
    """
    assert (
        httpx.get(f"{server.url}/sampling", timeout=120).json()["logprobs_mode"]
        == "processed_logprobs"
    )
    prompt, model = [72, 101, 108, 108, 111], load_model(str(server.model), torch.float32)
    for asked, meant in ((0.6, 0.6), (1.7, 1.7), (0.0, 1.0)):
        answer = server.generate(prompt, max_tokens=8, temperature=asked, seed=1, ignore_eos=True)
        ours = trainer_logprobs(model, prompt, answer["token_ids"][0], meant)
        torch.testing.assert_close(served_logprobs(answer, 0), ours, atol=TOLERANCE, rtol=0)
    answer = server.generate(prompt, max_tokens=8, top_k=1, seed=1, ignore_eos=True)
    assert served_logprobs(answer, 0).tolist() == [0.0] * 8, "of the only token that is left"
    check_logprobs(TrainerConfig(model_name="any", vllm_port=server.port), Ranks())


@pytest.mark.parametrize("kind", KINDS)
def test_every_update_arrives_whole(
    server: VllmServer, kind: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, kind, free_port, monkeypatch) as (bridge, model):
        assert bridge.params_mapped == bridge.params_total == len(list(model.parameters()))
        for version in (1, 2, 5):
            stale = load_model(str(server.model), torch.float32)
            stale.load_state_dict(
                {name: tensor.clone() for name, tensor in model.state_dict().items()}
            )
            report = bridge.sync(version, new_weights(model, version))
            state = server.state()
            how = (state["transfer"] or state["mode"], report.bytes_moved > 0)
            assert (state["weight_version"], state["state"], how) == (
                version,
                "serving",
                (kind, kind != "single_copy"),
            )
            assert state["checksums"] == checksums(server, model) == [report.checksum]
            assert largest_difference(server, model) < TOLERANCE
            assert largest_difference(server, stale) > 0.01, (
                "the comparison must be able to see old weights"
            )
            assert state["last_bytes"] >= report.bytes_moved
            assert 0 < report.server_seconds["halted"] < sum(report.seconds.values())
        assert server.generate([1], max_tokens=2)["weight_versions"] == [5]


def test_single_copy_is_the_same_memory(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, "single_copy", free_port, monkeypatch) as (_, model):
        before = server.generate([5, 6], max_tokens=1, temperature=0.0, ignore_eos=True)
        with torch.no_grad():
            model.model.norm.weight.zero_()  # no update, no message: all logits are now equal
        try:
            after = server.generate([5, 7], max_tokens=1, temperature=0.0, ignore_eos=True)
            flat = torch.tensor(1 / 301).log().item()
            assert served_logprobs(after, 0)[0].item() == pytest.approx(flat, abs=1e-4)
            assert served_logprobs(before, 0)[0].item() != pytest.approx(flat, abs=1e-4)
        finally:
            model.model.norm.weight.data.fill_(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_across_an_update_says_which_tokens_are_whose(
    server: VllmServer, kind: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, kind, free_port, monkeypatch) as (bridge, model):
        old = load_model(str(server.model), torch.float32)
        prompt = [10, 20, 30]
        for version in range(
            1, 6
        ):  # on a busy machine the request may have ended before the update begins
            old.load_state_dict(
                {name: tensor.clone() for name, tensor in model.state_dict().items()}
            )
            answers: list[dict[str, list]] = []  # type: ignore[type-arg]

            def generate(into: list[dict[str, list]] = answers) -> None:  # type: ignore[type-arg]
                into.append(server.generate(prompt, n=2, max_tokens=450, seed=3, ignore_eos=True))

            thread = threading.Thread(target=generate)
            thread.start()
            wait_until_generating(server, thread)
            began = time.monotonic()
            bridge.sync(version, new_weights(model, version))
            thread.join(SOON)
            (answer,) = answers
            crossed = 0
            for i, tokens in enumerate(answer["token_ids"]):
                spans = answer["weight_version_spans"][i]
                assert sum(count for _, count in spans) == len(tokens) == 450
                assert answer["weight_versions"][i] == version - 1
                assert [number for number, _ in spans] in ([version - 1], [version - 1, version])
                crossed += len(spans) == 2
                served, cut = served_logprobs(answer, i), spans[0][1]
                assert (served - trainer_logprobs(old, prompt, tokens))[
                    :cut
                ].abs().max() < TOLERANCE * 5
                if cut < len(tokens):
                    assert (served - trainer_logprobs(model, prompt, tokens))[
                        cut:
                    ].abs().max() < TOLERANCE * 5
            if crossed == 2:
                stalled = stalled_of(server)
                assert stalled is not None, "the server never said when its engine went on"
                assert 0 < stalled < time.monotonic() - began
                require_timeline(server, version)
                return
    pytest.fail("no update fell into a request")


def test_an_idle_server_did_not_stand_still_until_the_next_request(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, "single_copy", free_port, monkeypatch) as (bridge, model):
        bridge.sync(1, new_weights(model, 1))
        server.generate([1, 2], max_tokens=2)
        assert stalled_of(server, seconds=3.0) is None


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_is_refused_before_it_is_served(
    server: VllmServer, kind: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, kind, free_port, monkeypatch) as (bridge, model):
        name, parameter = list(model.named_parameters())[3]

        def write() -> None:
            parameter.data.view(-1)[7] = float("nan")

        with pytest.raises(BridgeError, match=f"{name} holds NaN"):
            bridge.sync(1, write)
        state = server.state()
        if kind != "single_copy":  # the old weights were never touched
            assert (state["state"], state["weight_version"]) == ("serving", 0)
            assert (
                largest_difference(server, load_model(str(server.model), torch.float32)) < TOLERANCE
            )
        else:  # there is one copy, and it is spoilt: nothing may be sampled until it has been replaced
            assert state["state"] == "unhealthy"
            assert httpx.get(f"{server.url}/health", timeout=120).status_code == 503
            refused = httpx.post(f"{server.url}/generate", json={"prompt": "x"}, timeout=120)
            assert refused.status_code == 503
            assert "holds NaN" in refused.json()["error"]
            fresh = load_model(str(server.model), torch.float32)
            bridge.sync(1, lambda: model.load_state_dict(fresh.state_dict()))
        assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
        assert largest_difference(server, load_model(str(server.model), torch.float32)) < TOLERANCE


def test_a_single_copy_knows_its_sums_before_it_is_written(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, "single_copy", free_port, monkeypatch) as (bridge, model):
        for version in (1, 2):
            masters, write = new_masters(model, version)
            report = bridge.sync(version, write, masters)
            assert list(report.seconds)[:3] == ["checksum", "begin", "write"]
            assert server.state()["checksums"] == checksums(server, model) == [report.checksum]
            assert largest_difference(server, model) < TOLERANCE
        masters, write = new_masters(model, 3)
        name = list(masters)[3]
        masters[name].view(-1)[7] = float("inf")
        with pytest.raises(
            BridgeError, match=f"version 3 is not sent: {name} holds NaN or infinity"
        ):
            bridge.sync(3, write, masters)
        assert (server.state()["state"], server.state()["weight_version"]) == ("serving", 2)
        assert largest_difference(server, model) < TOLERANCE
        masters, write = new_masters(model, 3)
        other, _ = new_masters(model, 4)
        with pytest.raises(BridgeError, match="checksum"):
            bridge.sync(3, write, other)  # what is written is not what was announced
        assert server.state()["state"] == "unhealthy"
        bridge.sync(3, write, masters)
        assert (server.state()["state"], server.state()["weight_version"]) == ("serving", 3)


def test_events_that_cannot_be_waited_for_are_not_relied_upon(server: VllmServer) -> None:
    client = BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
    shapes = shapes_of(load_model(str(server.model), torch.float32))
    assert client.init("single_copy", shapes)["follows_writes"] is False
    assert client.init("single_copy", shapes, events=["no handle"])["follows_writes"] is False
    with pytest.raises(BridgeError, match=r"2 event\(s\) for 1 rank\(s\)"):
        client.init("single_copy", shapes, events=["one", "too many"])
    client.close()


def start_late_trainer(processes: Processes, server: VllmServer) -> ManagedProcess:
    """A trainer that knows that the server stands still, and has stopped (SIGSTOP) before it
    writes.
    """
    command = [
        sys.executable,
        ROOT / "tests/e2e/late_trainer.py",
        str(server.port),
        server.model,
        str(BRIDGE_TIMEOUT),
    ]
    trainer = processes.start("late trainer", command, may_finish=True)
    processes.wait_for_text(trainer, "about to write", 180)
    return trainer


def test_a_trainer_that_is_stopped_before_its_first_write(
    server: VllmServer, processes: Processes, free_port: Callable[[], int]
) -> None:
    before = server.state()
    asking: list[dict[str, list]] = []  # type: ignore[type-arg]
    trainer = start_late_trainer(processes, server)
    held = threading.Thread(
        target=lambda: asking.append(server.generate([1, 2], max_tokens=4, ignore_eos=True))
    )
    held.start()
    # It may write as soon as it goes on, whatever the checksum of the weights is now.
    state = wait_for_state(server, "unhealthy")
    who = f"{os.uname().nodename}:{trainer.command_pid()}"
    assert (state["engine"], state["checksums"]) == ("paused", before["checksums"])
    assert f"nothing from trainer {who}" in str(state["last_error"])
    assert f"let it go on, so that it gives that back, or end its process: {who}" in str(
        state["undecided"]
    )
    refuses_to_sample(server)
    other = BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
    with pytest.raises(
        BridgeError,
        match=rf"no other process may write the weights now: trainer {who} may still write",
    ):
        other.init(
            "single_copy",
            shapes_of(load_model(str(server.model), torch.float32)),
            may_wait=lambda: False,
        )
    other.close()
    assert not asking, "a token was sampled from weights that might change under it"

    os.kill(trainer.command_pid(), signal.SIGCONT)
    said = processes.finish(trainer, SOON)
    held.join(SOON)
    assert "the server's lease ran out" in said
    assert "doing the update to version 1 again" in said
    state = server.state()
    assert (state["state"], state["weight_version"], state["engine"]) == ("serving", 1, "running")
    assert f"with checksum {state['checksums'][0]}" in said  # type: ignore[index]
    spans = asking[0]["weight_version_spans"][0]
    # The old weights are served again between the lease's return and the update that is repeated.
    assert {version for version, _ in spans} <= {before["weight_version"], 1}
    assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200


def test_a_trainer_that_is_killed_before_its_first_write_leaves_the_old_version(
    server: VllmServer, processes: Processes
) -> None:
    before = server.state()
    trainer = start_late_trainer(processes, server)
    assert server.state()["state"] == "updating"
    asking: list[dict[str, list]] = []  # type: ignore[type-arg]
    held = threading.Thread(
        target=lambda: asking.append(server.generate([1, 2], max_tokens=4, ignore_eos=True))
    )
    held.start()
    processes.kill(trainer)
    state = wait_for_state(server, "serving")
    held.join(SOON)
    assert (state["weight_version"], state["checksums"]) == (
        before["weight_version"],
        before["checksums"],
    )
    assert asking[0]["weight_versions"] == [before["weight_version"]]
    assert re.search("has ended", str(state["last_error"]))


def test_a_step_that_comes_after_the_deadline_is_told_apart(server: VllmServer) -> None:
    client = BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
    epoch = client.init("single_copy", shapes_of(load_model(str(server.model), torch.float32)))[
        "epoch"
    ]
    lease = client.begin(epoch, 9)
    assert lease is not None
    assert 0 < lease["deadline"] - time.monotonic() <= BRIDGE_TIMEOUT
    stale = {"epoch": epoch, "version": 9, "checksums": ["0"], "lease": "another"}
    with pytest.raises(LeaseLost, match="the lease another does not count"):
        client.post("commit", stale)
    assert client.abort(epoch, "no wish to go on")
    assert server.state()["state"] == "serving"
    with pytest.raises(LeaseLost, match="no lease is out"):
        client.commit(epoch, 9, ["0"])
    client.close()


def test_a_server_in_quarantine_answers_nothing_until_a_full_update(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(server, "single_copy", free_port, monkeypatch) as (bridge, model):
        client = BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
        client.quarantine(int(str(server.state()["epoch"])), "it was late")
        for route in ("health", "weights"):
            assert (
                "in quarantine: it was late" in httpx.get(f"{server.url}/{route}", timeout=120).text
            )
        assert (server.state()["state"], server.state()["engine"]) == ("unhealthy", "paused")
        bridge.sync(1, new_weights(model, 1))
        told = httpx.get(f"{server.url}/weights", timeout=120).json()
        assert (told["serving"], told["weight_version"], told["trouble"]) == (True, 1, "")
        assert largest_difference(server, model) < TOLERANCE


def test_another_model_is_refused_with_both_shapes(server: VllmServer, tmp_path: Path) -> None:
    other = load_model(str(make_tiny_model(tmp_path / "other", layers=3)), torch.float32)
    bridge = BroadcastBridge(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT))
    with pytest.raises(
        BridgeError, match=r"model.layers.2.*: the trainer has it, vLLM does not.*same model"
    ):
        bridge.connect(other)
    half = load_model(str(server.model), torch.bfloat16)
    with pytest.raises(BridgeError, match="dtype bfloat16 in the trainer, float32 in vLLM"):
        BridgeServer("localhost", server.port, BRIDGE_TIMEOUT).init("broadcast", shapes_of(half))


def test_a_second_trainer_takes_over_and_the_first_is_told(
    server: VllmServer, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        joined(server, "single_copy", free_port, monkeypatch) as (first, _),
        joined(server, "overlapped", free_port, monkeypatch) as (second, _model),
    ):
        with pytest.raises(BridgeError, match=r"epoch \d+ is over"):
            first.sync(1, lambda: None)
        assert second.sync(1, lambda: None).version == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": {"prompt_token_ids": []}}, 400, "prompt_token_ids"),
        ({"prompt": "x", "temprature": 1}, 400, "temprature"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": {"prompt_token_ids": [1] * 600}}, 400, "512"),
        ({"prompt": {"prompt_token_ids": [10**6]}}, 400, "1000000"),
    ],
)
def test_a_bad_request_names_what_is_bad(
    server: VllmServer, body: dict[str, object], status: int, message: str
) -> None:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == status, response.text
    assert message in response.text


def test_text_prompts_and_stop_strings(server: VllmServer) -> None:
    response = httpx.post(
        f"{server.url}/generate",
        json={"prompt": "Hello", "max_tokens": 3, "ignore_eos": True},
        timeout=60,
    )
    answer = response.json()
    assert answer["prompt"] == "Hello"
    assert len(answer["prompt_token_ids"]) == 5
    assert answer["finish_reasons"] == ["length"]


def test_samples_of_a_group_differ_and_repeat_with_their_seed(server: VllmServer) -> None:
    one, again = (
        server.generate([65, 66], n=4, max_tokens=16, seed=11, ignore_eos=True)["token_ids"]
        for _ in range(2)
    )
    assert one == again
    assert len({tuple(tokens) for tokens in one}) == 4


def test_the_promised_lines_are_in_the_log(server: VllmServer) -> None:
    for line in (
        "[vLLM Patch] ✓ Exported 18 params",
        "[vLLM Patch] ✓ Shared memory setup complete!",
        "[vLLM Patch] ✓ Weight updater thread started (name: WeightUpdater_TP0)",
        f"Uvicorn running on http://0.0.0.0:{server.port}",
    ):
        assert line in server.log


def test_the_config_file_is_private_and_complete(server: VllmServer) -> None:
    path = Path(httpx.get(f"{server.url}/bridge/info", timeout=120).json()["config_path"])
    assert path.name == "vllm_bridge_config.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "model.layers.1.mlp.gate_up_proj.weight" in path.read_text()
