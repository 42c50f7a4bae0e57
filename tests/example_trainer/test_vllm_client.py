"""The errors of VLLMClient with a server that is there, away, loading, silent, or another program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_trainer.errors import BridgeError
from example_trainer.process import StopRequested, StopSignal
from example_trainer.vllm_client import ServerRefused, ServerSilent, VLLMClient
from example_trainer.weight_bridge.base import LeaseLost
from example_trainer.weight_bridge.lora import LoraServer
from example_trainer.weight_bridge.server import LEASE_LOST, BridgeServer
from tests.http_server import Answer, HttpServer, Script


class ScriptedServer(Script, HttpServer):
    """Gives its answers in turn, and records the requests."""

    def __init__(self) -> None:
        Script.__init__(self)
        HttpServer.__init__(self, self)


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def test_an_answer_comes_back_and_the_key_goes_along(script: ScriptedServer) -> None:
    script.answers = [(200, {"token_ids": [[1]]})]
    client = VLLMClient(script.url, 60.0, "secret")
    assert client.call("/generate", {"n": 1}) == {"token_ids": [[1]]}
    (request,) = script.requests
    assert (request.method, request.path, request.headers["Authorization"], request.json) == (
        "POST",
        "/generate",
        "Bearer secret",
        {"n": 1},
    )
    client.close()
    client.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((409, {"error": "another trainer is here"}), "refused the step: another trainer is here"),
        ((422, {"detail": "no such field"}), "refused the step: no such field"),
        ((500, b"Internal Server Error"), "refused the step: 500 Internal Server Error"),
        ((200, b"<html>"), "answered the step with no JSON object .*<html>.*vllm_api_server.py"),
        ((200, [1]), "answered the step with no JSON object"),
    ],
)
def test_a_refusal_holds_the_servers_reason_and_its_status(
    script: ScriptedServer, answer: tuple[int, object], message: str
) -> None:
    script.answers = [answer]
    with pytest.raises(ServerRefused, match=f"^{script.url} {message}") as caught:
        VLLMClient(script.url, 60.0).call("/step", {}, "the step")
    assert caught.value.status == answer[0]
    assert isinstance(caught.value, BridgeError)


def test_silence_is_told_from_a_refusal(
    script: ScriptedServer, free_port: Callable[[], int]
) -> None:
    script.answers = [None]
    for url in (script.url, f"http://127.0.0.1:{free_port()}"):
        with pytest.raises(
            ServerSilent,
            match=rf"^{url} did not answer /step \(.+\); see the server's log, and restart it",
        ):
            VLLMClient(url, 60.0).call("/step", {})
    assert len(script.requests) == 1  # a request that may have arrived is not sent twice


@pytest.mark.parametrize("answer", [None, (503, {"error": "busy"}), (200, [1]), (200, b"hello")])
def test_a_look_finds_an_object_or_nothing(script: ScriptedServer, answer: Answer) -> None:
    client = VLLMClient(script.url, 60.0)
    script.answers = [answer, (200, {"weight_version": 3})]
    assert client.look("/bridge/state") is None
    assert client.look("/bridge/state") == {"weight_version": 3}


def test_a_look_at_a_server_that_has_left_finds_nothing(script: ScriptedServer) -> None:
    client = VLLMClient(script.url, 60.0)
    client.close()
    assert client.look("/bridge/info") is None


def test_a_server_that_is_away_is_told_once_each_time(
    script: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = VLLMClient(script.url, 60.0)
    script.answers = [None, None, (200, {}), None]
    for _ in range(4):
        client.watch("/bridge/state", "the weights")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    line = f"[Bridge] the vLLM server at {script.url} does not answer; start it again, it will get the weights"
    assert told == [line, line]


@pytest.mark.parametrize(
    ("answer", "missing"),
    [((200, b""), None), ((503, {}), "/health answers 503"), (None, r"/health: .+")],
)
def test_what_a_server_of_any_kind_still_lacks(
    script: ScriptedServer, answer: Answer, missing: str | None
) -> None:
    script.answers = [answer]
    found = VLLMClient(script.url, 60.0).missing("/health")
    assert (found is None) == (missing is None)
    if found is not None and missing is not None:
        assert found == missing or found.startswith("/health: ")


def test_a_server_that_loads_or_is_not_there_yet_is_waited_for(script: ScriptedServer) -> None:
    slept: list[float] = []
    script.answers = [None, (503, {"error": "loading"}), (200, {"instance": "one"})]
    client = BridgeServer("127.0.0.1", script.port, 60.0, startup_timeout=60.0, sleep=slept.append)
    assert client.wait_for_info() == {"instance": "one"}
    assert len(slept) == 2


@pytest.mark.parametrize("kind", [BridgeServer, LoraServer])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (404, {"detail": "Not Found"}),
            r"is a server without /(bridge|lora) routes; start it with `.*vllm_api_server.py.*`",
        ),
        ((400, {"error": "not shared"}), r"refuses (the bridge|LoRA): not shared"),
        ((200, b"<html>"), r"refuses (the bridge|LoRA): no JSON object: 200 <html>"),
    ],
)
def test_what_waiting_does_not_mend_is_told_at_once(
    script: ScriptedServer,
    kind: type[BridgeServer | LoraServer],
    answer: tuple[int, object],
    message: str,
) -> None:
    def no_sleep(_: float) -> None:
        raise AssertionError("there is nothing to wait for")

    script.answers = [answer]
    with pytest.raises(BridgeError, match=message):
        kind("127.0.0.1", script.port, 60.0, None, 60.0, no_sleep).wait_for_info()


def test_a_deadline_ends_the_wait_with_both_remedies(script: ScriptedServer) -> None:
    script.answers = [(503, {"error": "still loading"})]
    client = LoraServer("127.0.0.1", script.port, 60.0, None, 0.0)
    with pytest.raises(
        BridgeError,
        match=r"no vLLM server .* after 0 s \(still loading\); start it .*--enable-lora.*--vllm-host.*--service-timeout",
    ):
        client.wait_for_info()


def test_a_signal_ends_the_wait(script: ScriptedServer) -> None:
    script.answers = [(503, {})]
    stop = StopSignal()
    stop.request(15)
    with pytest.raises(StopRequested):
        LoraServer("127.0.0.1", script.port, 60.0, None, 600.0, stop.wait).wait_for_info()


def test_a_lost_lease_keeps_its_kind(script: ScriptedServer) -> None:
    script.answers = [(LEASE_LOST, {"error": "no lease is out"})]
    with pytest.raises(LeaseLost, match="refused /bridge/commit of version 3: no lease is out"):
        BridgeServer("127.0.0.1", script.port, 60.0).commit(1, 3, ["00"])


def test_an_adapter_is_loaded_again_by_a_server_that_came_back_without_it(
    script: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = LoraServer("127.0.0.1", script.port, 60.0, None, 60.0, lambda _: None, weight_epoch=7)
    script.answers = [
        (200, {"name": "a1"}),
        None,
        (503, {}),
        (200, {"max_rank": 16}),
        (200, {"name": "a2"}),
    ]
    server.load(Path("/first"), 1, "00")
    assert server.load(Path("/second"), 2, "11")["name"] == server.serves == "a2"
    bodies = [one.json for one in script.requests if one.method == "POST"]
    assert [body["replaces"] for body in bodies if isinstance(body, dict)] == [None, "a1", None]
    assert {body["weight_epoch"] for body in bodies if isinstance(body, dict)} == {7}
    assert "did not answer" in caplog.text
    assert "waiting for it to be there again" in caplog.text


def test_an_adapter_that_the_server_cannot_see_is_told_with_the_remedy(
    script: ScriptedServer,
) -> None:
    script.answers = [(400, {"error": "cannot read /x/adapter_config.json"})]
    with pytest.raises(
        BridgeError,
        match=r"refused the adapter of version 4: cannot read /x.*must see the same --save-path",
    ):
        LoraServer("127.0.0.1", script.port, 60.0).load(Path("/x"), 4, "00")


def test_a_server_that_cannot_be_sampled_from_is_named_with_its_reason(
    script: ScriptedServer,
) -> None:
    client = VLLMClient(script.url, 60.0)
    script.answers = [(200, {"serving": False, "trouble": "the engine has not answered for 30 s"})]
    assert client.why_not_serving() == f"{script.url} (the engine has not answered for 30 s)"
    script.answers = [(404, {}), (503, {})]
    assert client.why_not_serving() == f"{script.url} (/health answers 503)"
    script.answers = [(404, {}), (200, {})]
    assert client.why_not_serving() == "", "a server of another project"
    script.answers = [None]
    assert client.why_not_serving().startswith(f"{script.url} (/health: ")
    script.answers = [(200, {"serving": True, "trouble": ""})]
    assert client.why_not_serving() == ""
    client.close()
