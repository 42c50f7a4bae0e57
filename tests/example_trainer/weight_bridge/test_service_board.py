"""The fleet's table at a rollout service that refuses it: logged once for each reason, with the
remedy, and when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.factory import make_bridge
from example_trainer.weight_bridge.fleet import Fleet
from example_trainer.weight_bridge.fleet_updates import FleetKeeper
from example_trainer.weight_bridge.service_board import ServiceBoard
from tests.http_server import Answer, HttpServer, Request

TAKEN = (200, {"status": "success", "wanted": ["http://d:9001"], "left": []})


class Service(HttpServer):
    """Answers POST /fleet by its script, and, if it has a key, refuses callers without it."""

    def __init__(self, port: int = 0) -> None:
        self.next: tuple[int, object] = TAKEN
        self.key = ""
        super().__init__(self.fleet, port)

    def fleet(self, request: Request) -> Answer:
        if self.key and request.headers["Authorization"] != f"Bearer {self.key}":
            return 401, {"detail": "the request carries no bearer token"}
        status, body = self.next
        if isinstance(body, str):
            return status, body.encode()
        return status, body


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as one:
        yield one


@pytest.mark.parametrize(
    ("answer", "named", "remedy"),
    [
        (
            (401, {"detail": "the request carries no bearer token"}),
            "401 ",
            "--atropos-api-key, or ROLLOUT_API_KEY",
        ),
        (
            (403, {"detail": "the Host 'x' is none that this service goes by"}),
            "none that this service goes by",
            "with a key",
        ),
        ((404, {"detail": "Not Found"}), "404 ", "python -m atroposlib.cli.run_api"),
        ((409, {"detail": "another trainer is registered"}), "409 ", "--atropos-url"),
        ((422, {"detail": "servers: too many"}), "422 ", "the same checkout"),
        ((503, "starting"), "503 starting", "it is asked again"),
        ((200, "<html>a page</html>"), "200 <html>", "--atropos-url"),
        ((200, ["no", "table"]), "200 ", "--atropos-url"),
    ],
)
def test_a_table_that_is_refused_is_said_once_with_what_to_do_and_once_when_it_is_taken_again(
    service: Service,
    answer: tuple[int, object],
    named: str,
    remedy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "example_trainer")
    board = ServiceBoard(service.url, None)
    assert board.publish([]) == (["http://d:9001"], [])
    assert caplog.messages == [], "nothing is said of what works"
    for _ in range(2):
        caplog.clear()
        service.next = answer
        assert [board.publish([]) for _ in range(3)] == [None] * 3
        (warning,) = caplog.records
        assert warning.levelname == "WARNING"
        told = warning.getMessage()
        assert (
            f"the rollout service at {service.url} does not take the fleet's table: POST /fleet: "
            in told
        )
        assert named in told
        assert remedy in told
        caplog.clear()
        service.next = TAKEN
        assert [board.publish([]) for _ in range(2)] == [(["http://d:9001"], [])] * 2
        assert caplog.messages == [
            f"[Fleet] the rollout service at {service.url} takes the fleet's table again"
        ]
    board.close()


@pytest.mark.parametrize(
    ("by", "silence"), [("", []), ("parameter server a-9101", ["POST /fleet: no answer ("])]
)
def test_each_reason_is_said_once_however_they_alternate_and_a_trainer_leaves_silence_to_others(
    free_port: Callable[[], int], by: str, silence: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "example_trainer")
    port = free_port()
    board = ServiceBoard(f"http://127.0.0.1:{port}", None, by)
    for _ in range(2):
        assert board.publish([]) is None
        with Service(port) as service:
            service.key = "hush"
            assert board.publish([]) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (len(silence) + 1)
    for told, named in zip(caplog.messages, [*silence, "POST /fleet: 401 "], strict=True):
        assert named in told
    board.close()


@pytest.mark.parametrize("has_service", [True, False])
def test_a_run_without_a_service_shows_its_servers_to_none_that_happens_to_listen(
    service: Service, has_service: bool
) -> None:
    options = {
        "model_name": "m",
        "weight_bridge_mode": "shared_vllm",
        "use_shared_memory": True,
        "atropos_url": service.url,
    }
    bridge = make_bridge(TrainerConfig.model_validate(options), has_service=has_service)
    assert isinstance(bridge, BroadcastBridge)
    bridge._keeper._publish()
    bridge.close()
    assert len(service.requests) == has_service


def test_with_the_key_the_table_is_taken(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.key = "hush"
    board = ServiceBoard(service.url, "hush")
    assert board.publish([]) == (["http://d:9001"], [])
    assert caplog.messages == []
    board.close()


def test_a_keeper_that_has_failed_ends_the_training_with_what_to_do() -> None:
    class Broken(ServiceBoard):
        def publish(self, rows: object) -> None:
            raise RuntimeError("out of file descriptors")

    keeper = FleetKeeper(
        Fleet([], 0, 1.0, 0.0), {}, lambda url: pytest.fail(url), Broken("http://127.0.0.1:1", None)
    )
    keeper.start()
    keeper._thread.join(60)
    with pytest.raises(
        BridgeError,
        match=r"RuntimeError: out of file descriptors\)\. Start this process again, .*--resume auto",
    ):
        keeper.due()
    keeper.close()


def test_a_server_of_the_trainers_own_is_not_at_an_ipv6_address(
    free_port: Callable[[], int],
) -> None:
    options = {"model_name": "m", "vllm_host": "::1", "vllm_port": free_port()}
    with pytest.raises(BridgeError, match=r"--vllm-host \[::1\]: .* listens on IPv4 only"):
        make_bridge(TrainerConfig.model_validate(options))
