"""The rollout service's table of a run's servers: the real one, over HTTP."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from example_trainer.async_grpo.actor import Address
from example_trainer.async_grpo.service import ServiceFleet
from tests.conftest import Processes

OLD, NEW, OTHER = (Address("localhost", (port,)) for port in (7001, 7002, 7003))


class Service:
    """The place of a service, and what it has been asked for."""

    def __init__(self, port: int) -> None:
        self.place = Address("localhost", (port,))

    def wishes(self) -> tuple[list[str], list[str]]:
        told = (
            httpx.get(f"{self.place.url}/fleet", timeout=60, trust_env=False)
            .raise_for_status()
            .json()
        )
        return told["wanted"], told["left"]

    def wish(self, path: str, place: Address) -> None:
        url = f"{self.place.url}/fleet/{path}"
        httpx.post(url, json={"url": place.url}, timeout=60, trust_env=False).raise_for_status()

    def publish(self, *places: Address) -> None:
        servers = [{"url": place.url, "standing": "good"} for place in places]
        httpx.post(
            f"{self.place.url}/fleet", json={"servers": servers}, timeout=60, trust_env=False
        ).raise_for_status()


@pytest.fixture
def service(free_port: Callable[[], int]) -> Service:
    return Service(free_port())


def test_a_service_that_is_away_is_told_of_a_moved_server_when_it_is_back(
    service: Service, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fleet = ServiceFleet("")
    fleet.moved(OLD, NEW)
    for _ in range(3):
        fleet.tell(service.place, [NEW.url])
    (said,) = caplog.messages
    assert f"{NEW.url} shall join, {OLD.url} shall leave" in said
    assert "Connection refused" in said
    caplog.clear()
    processes.start_service(service.place.ports[0])
    for _ in range(3):
        fleet.tell(service.place, [NEW.url])
    assert service.wishes() == ([NEW.url], [OLD.url])
    assert [message for message in caplog.messages if "[Async]" in message] == [
        f"[Async] the trainer learns that {NEW.url} shall join",
        f"[Async] the trainer learns that {OLD.url} shall leave",
        f"[Async] the rollout service at {service.place.url} has taken the changes for the trainer",
    ]


def test_a_server_that_came_back_to_its_first_address_stays(
    service: Service, processes: Processes
) -> None:
    fleet = ServiceFleet("")
    fleet.moved(OLD, NEW)
    fleet.moved(NEW, OLD)
    processes.start_service(service.place.ports[0])
    fleet.tell(service.place, [OLD.url])
    assert service.wishes() == ([OLD.url], [NEW.url])


def test_a_server_that_nobody_knows_any_more_is_not_owed_for_ever(
    service: Service, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that was started since knows the new address alone, and the service refuses to let
    go of another.
    """
    processes.start_service(service.place.ports[0])
    service.publish(NEW)
    fleet = ServiceFleet("")
    fleet.moved(OLD, NEW)
    fleet.tell(service.place, [NEW.url])
    assert service.wishes() == ([NEW.url], [])
    assert "cannot learn yet" not in caplog.text


def test_what_an_earlier_run_wished_is_undone_once(service: Service, processes: Processes) -> None:
    processes.start_service(service.place.ports[0])
    service.wish("join", OLD)
    service.wish("leave", NEW)
    fleet = ServiceFleet("")
    fleet.tell(
        service.place, None
    )  # a generator has no place yet: whose address is whose is not known
    assert service.wishes() == ([OLD.url], [NEW.url])
    fleet.tell(service.place, [NEW.url])
    assert service.wishes() == ([NEW.url], [OLD.url])
    service.wish("join", OTHER)  # by hand, in this run
    fleet.tell(service.place, [NEW.url])
    assert service.wishes() == ([NEW.url, OTHER.url], [OLD.url])
