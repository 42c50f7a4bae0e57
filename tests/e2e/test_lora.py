"""LoRA with the real vLLM: an adapter is served as the merged model would be, at once, and what
goes wrong changes nothing.
"""

from __future__ import annotations

import http.client
import json
import re
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError
from example_trainer.launcher import roles
from example_trainer.models import Decoder, load_model
from example_trainer.models.lora.layers import adapters_of
from example_trainer.models.lora.peft_format import AdapterWriter
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.logprobs_mode import check_logprobs
from example_trainer.weight_bridge.lora import LoraBridge, LoraServer
from example_trainer.weight_bridge.server import planned_shapes
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import made_up_group, trainer_logprobs
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, make_tiny_model, start_vllm
from tests.e2e.lora_helpers import (
    CLEARLY,
    PROMPTS,
    SETTINGS,
    TOLERANCE,
    adapted,
    difference,
    load,
    merged,
    metric,
    redraw,
    sample,
    status,
    wait_for_requests,
)
from vllm_patching.weights.families import PROJECTIONS

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


@pytest.fixture(scope="module")
def lora_server(
    module_processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmServer:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    flags = (
        "--enable-lora",
        "--bridge-timeout",
        str(BRIDGE_TIMEOUT),
        "--chat-template",
        str(folder / "chat.jinja"),
    )
    return start_vllm(module_processes, free_port, tiny_model, folder, shared=False, flags=flags)


@pytest.fixture
def joined(lora_server: VllmServer, tmp_path: Path) -> Iterator[tuple[LoraBridge, Decoder]]:
    """A trainer's half of the bridge and its model.

    The server serves the base model before and after.
    """
    httpx.post(f"{lora_server.url}/lora/unload", timeout=120).raise_for_status()
    server = LoraServer("localhost", lora_server.port, BRIDGE_TIMEOUT, None, BRIDGE_TIMEOUT)
    bridge = LoraBridge([server], SETTINGS, tmp_path / "saved", str(lora_server.model))
    assert bridge.serving_dtype() is torch.float32
    model = adapted(lora_server.model)
    bridge.connect(model)
    yield bridge, model
    bridge.close()
    httpx.post(f"{lora_server.url}/lora/unload", timeout=120).raise_for_status()


def test_every_adapter_is_served_as_the_merged_model(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    bridge, model = joined
    base = load_model(str(lora_server.model), torch.float32)
    assert max(difference(answer, base) for answer in sample(lora_server, 0)) < TOLERANCE
    assert bridge.params_mapped == bridge.params_total == 2 * 7 * 2
    before = base
    for version in (
        1,
        2,
        3,
    ):  # the same prompts each time: nothing of an older adapter may come out of the prefix cache
        report = bridge.sync(version, redraw(model, version))
        now = merged(model, lora_server.model)
        answers = sample(lora_server, version)
        assert max(difference(answer, now) for answer in answers) < TOLERANCE
        assert min(difference(answer, before) for answer in answers) > CLEARLY
        before = now
        served = status(lora_server)
        assert served["current"]["checksum"] == report.checksum
        assert (
            served["current"]["version"],
            served["weight_version"],
            served["current"]["rank"],
        ) == (version, version, 8)
        assert set(served["last_swap"]) == {"wait", "read", "check", "install", "call", "total"}
        assert report.bytes_moved == sum(
            parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
        )
    folders = {
        path.name.partition("-")[0] for path in Path(served["current"]["path"]).parent.iterdir()
    }
    assert folders == {"v3"}
    assert served["retiring"] == []
    deadline = time.monotonic() + 120
    while (served := status(lora_server))[
        "removing"
    ]:  # until the workers have answered that they hold the third alone
        assert time.monotonic() < deadline, served
        time.sleep(0.05)
    assert served["removal_error"] == ""


def test_processed_logprobs_are_of_the_temperature(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    """The server's description of its logprobs is true, and the trainer computes the same ones, at
    any temperature.
    """
    _, model = joined
    answer = lora_server.generate(
        PROMPTS[0], max_tokens=12, temperature=0.6, seed=7, ignore_eos=True
    )
    assert difference(answer, model, temperature=0.6) < TOLERANCE < difference(answer, model)
    for temperature in (0.6, 1.0):
        check_logprobs(
            TrainerConfig(model_name="any", vllm_port=lora_server.port, temperature=temperature),
            Ranks(),
        )


def test_prefixes_are_shared_under_one_adapter(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    """The control of the test above: there is a cache, and it works."""

    bridge, model = joined
    bridge.sync(1, redraw(model, 11))
    prompt = list(range(40, 240))
    counts = [metric(lora_server, "vllm:prefix_cache_hits_total")]
    for _ in range(2):
        lora_server.generate(prompt, max_tokens=1)
        counts.append(metric(lora_server, "vllm:prefix_cache_hits_total"))
    assert counts[1] == counts[0]
    assert counts[2] > counts[1]


def test_completions_and_chat_use_the_newest_adapter(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    bridge, model = joined
    bodies = {
        "completions": {"prompt": [1, 2, 3], "logprobs": 0},
        "chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True},
    }

    def ask(route: str) -> list[float]:
        body = {
            "model": str(lora_server.model),
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            **bodies[route],
        }
        response = httpx.post(f"{lora_server.url}/v1/{route}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        found = response.json()["choices"][0]["logprobs"]
        return found.get("token_logprobs") or [token["logprob"] for token in found["content"]]

    before = {route: ask(route) for route in bodies}
    bridge.sync(1, redraw(model, 21))
    for route, logprobs in before.items():
        assert max(abs(one - two) for one, two in zip(ask(route), logprobs, strict=True)) > 0.01, (
            route
        )
    prompt = [1, 2, 3]
    tokens = lora_server.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True)[
        "token_ids"
    ][0]
    expected = trainer_logprobs(merged(model, lora_server.model), prompt, tokens)
    assert (torch.tensor(ask("completions")) - expected).abs().max() < TOLERANCE


def test_a_request_that_is_under_way_keeps_its_adapter(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    bridge, model = joined
    prompt = [5, 6, 7]
    for version in (
        1,
        3,
        5,
        7,
    ):  # on a busy machine the request may have ended before the next adapter is there
        bridge.sync(version, redraw(model, 30 + version))
        first = merged(model, lora_server.model)
        answers: list[dict[str, Any]] = []

        def ask(into: list[dict[str, Any]] = answers) -> None:
            into.append(lora_server.generate(prompt, n=4, max_tokens=450, seed=3, ignore_eos=True))

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive() and status(lora_server)["current"]["requests"] != 4:
            time.sleep(0.01)
        bridge.sync(version + 1, redraw(model, 31 + version))
        during = status(lora_server)["retiring"]
        kept = bool(during) and Path(during[0]["path"]).is_dir()
        crossing = sample(lora_server, version + 1)
        thread.join(120)
        assert answers[0]["weight_versions"] == [version] * 4
        assert answers[0]["weight_version_spans"] == [[[version, 450]]] * 4
        assert difference(answers[0], first) < 5 * TOLERANCE
        second = merged(model, lora_server.model)
        assert max(difference(answer, second) for answer in crossing) < TOLERANCE
        assert status(lora_server)["retiring"] == []
        if during:
            assert [(old["version"], old["requests"]) for old in during] == [(version, 4)]
            assert kept
            return
    pytest.fail("no request was ever under way while an adapter was exchanged")


def test_more_adapters_in_use_than_slots(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    """Two fit into the server's slots; requests of the third wait for one of them, and each is
    sampled with its own.
    """
    bridge, model = joined
    answers: dict[int, dict[str, Any]] = {}

    def ask(version: int) -> None:
        answers[version] = lora_server.generate(
            [9, version], n=4, max_tokens=500, seed=version, ignore_eos=True
        )

    for attempt in range(
        5
    ):  # on a busy machine the first requests may have ended before the third begin
        versions = [10 * attempt + number for number in (1, 2, 3)]
        threads = [threading.Thread(target=ask, args=(version,)) for version in versions]
        for version, thread in zip(versions, threads, strict=True):
            bridge.sync(version, redraw(model, version))
            thread.start()
            while thread.is_alive() and not status(lora_server)["current"]["requests"]:
                time.sleep(0.01)
        in_use = [old["version"] for old in status(lora_server)["retiring"]]
        for thread in threads:
            thread.join(120)
        for version in versions:
            assert answers[version]["weight_versions"] == [version] * 4
            redraw(model, version)()
            assert difference(answers[version], merged(model, lora_server.model)) < 5 * TOLERANCE
        assert status(lora_server)["retiring"] == []
        if in_use == versions[:2]:
            return
    pytest.fail("three adapters were never in use at the same time")


def test_a_client_that_leaves_frees_its_adapter(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    bridge, model = joined
    bridge.sync(1, redraw(model, 81))
    body = {"prompt": {"prompt_token_ids": [1]}, "n": 8, "max_tokens": 500, "ignore_eos": True}
    for _ in range(
        5
    ):  # on a busy machine it may have been answered before the client is seen to wait
        before = metric(lora_server, "vllm:generation_tokens_total")
        connection = http.client.HTTPConnection("localhost", lora_server.port, timeout=60)
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        while not (answered := bool(select.select([connection.sock], [], [], 0)[0])):
            if status(lora_server)["current"]["requests"] == 8:
                break
        connection.close()
        wait_for_requests(lora_server, 0)
        if not answered and metric(lora_server, "vllm:generation_tokens_total") - before < 8 * 500:
            break
    else:
        pytest.fail("no client ever left before it was answered")
    bridge.sync(2, redraw(model, 82))
    assert status(lora_server)["retiring"] == []
    assert (
        max(
            difference(answer, merged(model, lora_server.model))
            for answer in sample(lora_server, 2)
        )
        < TOLERANCE
    )


def test_what_cannot_be_served_changes_nothing(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder], tmp_path: Path
) -> None:
    bridge, model = joined
    bridge.sync(4, redraw(model, 41))
    served = merged(model, lora_server.model)
    good = Path(status(lora_server)["current"]["path"])

    def copy(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    cut, spoilt, other = copy("cut"), tmp_path / "spoilt", tmp_path / "other"
    (cut / "adapter_model.safetensors").write_bytes(
        (cut / "adapter_model.safetensors").read_bytes()[:-8]
    )
    not_finite = adapted(lora_server.model)
    not_finite.get_parameter(next(adapters_of(not_finite)).parameter_name("lora_B")).data[0, 0] = (
        float("nan")
    )
    AdapterWriter(not_finite, SETTINGS, "x").write(spoilt)
    deeper = adapted(make_tiny_model(tmp_path / "deeper", layers=3))
    AdapterWriter(deeper, SETTINGS, "x").write(other)
    big = LoraSettings(32, 64.0, 0.0, PROJECTIONS)
    AdapterWriter(adapted(lora_server.model, big), big, "x").write(tmp_path / "big")
    for path, body, code, message in [
        (
            tmp_path / "none",
            {},
            400,
            "cannot read .*/none/adapter_config.json: No such file or directory",
        ),
        ("relative/folder", {}, 400, "path 'relative/folder' must be absolute"),
        (cut, {}, 400, "holds .* bytes of data, its header describes"),
        (spoilt, {}, 422, "rank 0: .* holds NaN or infinity"),
        (other, {}, 400, "layers.2.* has no place in the served model of 2 layers"),
        (tmp_path / "big", {}, 400, "rank 32 does not fit this server.* --max-lora-rank 16"),
        (good, {"checksum": "0" * 32}, 422, "checksum .*, 0{32} was announced"),
        (good, {"replaces": "lora-v0-1"}, 409, "is served, not lora-v0-1: another trainer"),
    ]:
        response = load(lora_server, path, **body)
        assert response.status_code == code, response.text
        assert re.search(message, response.json()["error"]), response.text
        assert status(lora_server)["last_error"] == response.json()["error"]
    assert max(difference(answer, served) for answer in sample(lora_server, 4)) < TOLERANCE
    bridge.sync(5, redraw(model, 42))
    assert status(lora_server)["last_error"] == ""
    assert (
        max(
            difference(answer, merged(model, lora_server.model))
            for answer in sample(lora_server, 5)
        )
        < TOLERANCE
    )


def test_a_trainer_on_another_base_model_is_told(lora_server: VllmServer, tmp_path: Path) -> None:
    server = LoraServer("localhost", lora_server.port, BRIDGE_TIMEOUT, None, BRIDGE_TIMEOUT)
    for name, folder, settings, message in [
        (
            "weights",
            make_tiny_model(tmp_path / "twin", seed=1),
            SETTINGS,
            r"the weights of --model-name .*twin \(checksum",
        ),
        (
            "layers",
            make_tiny_model(tmp_path / "deep", layers=3),
            SETTINGS,
            r"8 parameter\(s\) differ .*: .*layers\.2",
        ),
        (
            "rank",
            lora_server.model,
            LoraSettings(32, 1.0, 0.0, PROJECTIONS),
            r"--lora-r 32, and .* takes ranks up to 16",
        ),
    ]:
        bridge, model = (
            LoraBridge([server], settings, tmp_path, str(folder)),
            adapted(folder, settings),
        )
        bridge.serving_dtype()
        if name != "weights":  # everything else is known before a weight is loaded
            with pytest.raises(BridgeError, match=message):
                bridge.require_shapes(planned_shapes(model.geometry, torch.float32))
        with pytest.raises(BridgeError, match=message):
            bridge.connect(model)
        assert not (tmp_path / "serving").exists(), name


def test_two_trainers_on_one_server_are_told(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    bridge, model = joined
    bridge.sync(1, redraw(model, 51))
    assert load(lora_server, status(lora_server)["current"]["path"]).status_code == 200
    with pytest.raises(
        BridgeError, match=r"refused the adapter of version 2: lora-v99-\d+ is served, not lora-v1-"
    ):
        bridge.sync(2, redraw(model, 52))
    with pytest.raises(BridgeError, match="two trainers share a server"):
        bridge.keep_serving(lambda: None)


def test_a_server_that_lost_the_adapter_gets_it_again(
    lora_server: VllmServer, joined: tuple[LoraBridge, Decoder]
) -> None:
    bridge, model = joined
    bridge.sync(6, redraw(model, 61))
    bridge.keep_serving(lambda: None)
    assert status(lora_server)["current"]["version"] == 6
    httpx.post(
        f"{lora_server.url}/lora/unload", timeout=120
    ).raise_for_status()  # what a restart leaves: no adapter
    before = bridge.joins
    bridge.keep_serving(lambda: None)
    assert bridge.joins == before + 1
    assert (
        max(
            difference(answer, merged(model, lora_server.model))
            for answer in sample(lora_server, 6)
        )
        < TOLERANCE
    )


def test_training_serves_each_step_and_saves_what_peft_loads(
    lora_server: VllmServer, processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    httpx.post(f"{lora_server.url}/lora/unload", timeout=120).raise_for_status()
    api = f"http://127.0.0.1:{free_port()}"
    service = roles.service("127.0.0.1", int(api.rpartition(":")[2]))
    processes.start("service", service, environment={"PYTHONPATH": str(ROOT)}, directory=tmp_path)
    processes.wait_for_http(api, seconds=180)

    def trainer(steps: int, *options: str) -> str:
        settings: dict[str, roles.Value] = {
            "lora_r": 16,
            "lora_alpha": 32,
            "lr": 1e-2,
            "vllm_port": lora_server.port,
            "training_steps": steps,
            "batch_size": 4,
            "gradient_accumulation_steps": 1,
            "seq_len": 64,
            "num_threads": 1,
        }
        command = roles.anywhere(roles.trainer(lora_server.model, "lora", api, settings))
        process = processes.start(
            "trainer", [*command, *options], directory=tmp_path, may_finish=True
        )
        for number in range(steps):
            httpx.post(
                f"{api}/scored_data", json=made_up_group(number), timeout=60
            ).raise_for_status()
        return processes.finish(process, seconds=240)

    text = trainer(3)
    assert "equal on both sides, bit for bit" in text
    saved = tmp_path / "trained_model_checkpoints"
    assert [path.name for path in sorted(saved.iterdir())] == [
        "adapter_run.json",
        "adapter_step_3",
        "serving",
    ]
    served = Path(status(lora_server)["current"]["path"])
    assert [path for path in (saved / "serving").iterdir()] == [served]
    assert (status(lora_server)["current"]["version"], status(lora_server)["current"]["rank"]) == (
        3,
        16,
    )
    rows = [
        json.loads(line) for line in (tmp_path / "runs/grpo/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert all(row["params_mapped"] == row["params_total"] == 28 for row in rows)
    assert rows[-1]["checksum"] == status(lora_server)["current"]["checksum"]

    text = trainer(4, "--resume", "auto")
    assert "Resuming from trained_model_checkpoints/adapter_step_3 at step 3" in text
    assert status(lora_server)["current"]["version"] == 4
    assert not served.exists()  # the first trainer has ended and no request is served its adapter
    expect_peft_to_agree(lora_server, saved / "adapter_step_4")
    httpx.post(f"{lora_server.url}/lora/unload", timeout=120).raise_for_status()


def expect_peft_to_agree(server: VllmServer, adapter: Path) -> None:
    """Expect the server to sample from the adapter as PEFT loads it."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(server.model)
    peft = PeftModel.from_pretrained(base, adapter).eval()
    for answer in sample(server, 4):
        prompt = answer["prompt_token_ids"]
        for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
            with torch.no_grad():
                expected = peft(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
            for i, token in enumerate(tokens):
                assert (
                    abs(logprobs[i][str(token)] - float(expected[len(prompt) + i - 1, token]))
                    < 5 * TOLERANCE
                )
