"""The meeting place of trainer and servers: by the variables, by the routes, and the errors about a
wrong address.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.transport import addresses
from vllm_patching.transport.addresses import (
    RendezvousError,
    gloo_group,
    is_here,
    is_loopback,
    own_address,
    reach,
    rendezvous_address,
)

ELSEWHERE = "192.0.2.7"
"""Reserved for examples: no machine has it."""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "NUM_INFERENCE_NODES",
        "TORCHELASTIC_RUN_ID",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to anything but this machine begins at 10.0.0.5."""
    monkeypatch.setattr(
        addresses,
        "own_address",
        lambda host, port=9: "127.0.0.1" if is_loopback(host) else "10.0.0.5",
    )


@pytest.mark.parametrize("value", ["abc", "0", "70000", "-1"])
def test_a_wrong_master_port_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(RendezvousError, match="MASTER_PORT"):
        rendezvous_address()


def test_other_machines_need_an_address_that_they_can_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUM_INFERENCE_NODES", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(RendezvousError, match="MASTER_ADDR=localhost"):
        rendezvous_address()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert rendezvous_address() == ("10.0.0.1", 4000)
    monkeypatch.setenv("NUM_INFERENCE_NODES", "many")
    with pytest.raises(RendezvousError, match="NUM_INFERENCE_NODES='many'"):
        rendezvous_address()


def test_without_the_variable_it_is_the_address_on_the_way_to_the_servers(
    two_networks: None,
) -> None:
    assert rendezvous_address(["localhost", "127.0.0.1"]) == ("localhost", 29500)
    assert rendezvous_address(["localhost", ELSEWHERE]) == ("10.0.0.5", 29500)


def test_an_address_that_means_another_machine_there_is_refused_with_the_right_one(
    two_networks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(
        RendezvousError,
        match=rf"server {ELSEWHERE} is on another machine.*Set MASTER_ADDR=10\.0\.0\.5",
    ):
        rendezvous_address(["localhost", ELSEWHERE])
    assert rendezvous_address(["localhost"]) == ("127.0.0.1", 29500)


def test_under_torchrun_a_loopback_address_is_not_the_users(
    two_networks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert rendezvous_address([ELSEWHERE]) == ("10.0.0.5", 4001)
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")
    assert rendezvous_address([ELSEWHERE]) == ("10.9.9.9", 4001)


@given(st.ip_addresses())
def test_only_loopback_addresses_mean_each_machine_itself(address: object) -> None:
    assert is_loopback(str(address)) == address.is_loopback  # type: ignore[attr-defined]


def test_this_machine_is_here_and_a_machine_that_nobody_has_is_not() -> None:
    assert own_address("localhost") == "127.0.0.1"
    assert is_here("localhost")
    assert not is_here(ELSEWHERE)
    assert not is_here("no-such-machine.invalid")
    with pytest.raises(RendezvousError, match="no way to no-such-machine"):
        own_address("no-such-machine.invalid")


def test_a_port_that_nobody_listens_at_is_named_with_what_to_set(
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    with pytest.raises(RendezvousError) as error:
        reach("127.0.0.1", port, "vLLM rank 3", 0.3)
    for part in (
        "vLLM rank 3",
        socket.gethostname(),
        f"127.0.0.1:{port}",
        "refused",
        "MASTER_ADDR",
    ):
        assert part in str(error.value)


def test_a_rendezvous_that_comes_late_is_reached(free_port: Callable[[], int]) -> None:
    port = free_port()
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        late = threading.Timer(0.3, listening.listen)
        late.start()
        reach("127.0.0.1", port, "vLLM rank 0", 120.0)
        late.join()


def test_groups_meet_on_the_address_that_was_named(free_port: Callable[[], int]) -> None:
    port = free_port()
    stores = [dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)]
    stores.append(dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False))
    results: list[torch.Tensor] = [torch.tensor([7]), torch.tensor([0])]

    def member(rank: int) -> None:
        group = gloo_group(stores[rank], rank, 2, "localhost", 120.0)
        group.broadcast([results[rank]], dist.BroadcastOptions()).wait()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert [int(result) for result in results] == [7, 7]
