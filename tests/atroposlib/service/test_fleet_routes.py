"""The inference servers in the service's table: the targets, the servers that shall leave, the
trainer's reports.
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.service.fleet import (
    FORGET_SECONDS,
    FleetFullError,
    FleetRequests,
    FleetStatus,
    UnknownServerError,
)
from atroposlib.service.records import MAX_SERVERS
from atroposlib.web.addresses import server_address

from .conftest import Service, trainer

ONE, TWO = "http://10.0.0.5:9001", "http://gpu-2:9001"


def entry(url: str, standing: str = "good", **fields: Any) -> dict[str, Any]:
    told = {
        "url": url,
        "standing": standing,
        "weight_version": 3,
        "weight_epoch": 7,
        "since": 12.5,
        "reason": "",
    }
    return told | fields


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://Host:9001", "http://host:9001"),
        ("https://host:443/", "https://host:443"),
        ("http://[2001:DB8::1]:9001", "http://[2001:db8::1]:9001"),
    ],
)
def test_an_address_has_one_form(text: str, address: str) -> None:
    assert server_address(text) == address
    assert server_address(address) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu-2:9001", "http://"),
        ("ftp://gpu-2:9001", "http://"),
        ("http://gpu-2", "names no port"),
        ("http://gpu-2:0", "names no port"),
        ("http://gpu-2:70000", "not an address"),
        ("http://gpu-2:x", "not an address"),
        ("http://[::1:9001", "not an address"),
        ("http://:9001", "names no host"),
        ("http://gpu-2:9001/v1", "/v1"),
        ("http://gpu-2:9001?x=1", "after its port"),
        ("http://gpu-2:9001?", "after its port"),
        ("http://me:secret@gpu-2:9001", "password"),
        ("http://gpu-2 :9001", "a space"),
        ("http://gpu\n2:9001", "control character"),
        ("http://" + "a" * 400 + ":1", "longer than"),
        ("", "http://"),
    ],
)
def test_what_is_no_address_is_told_with_the_remedy(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"write http://HOST:PORT|leave them out") as caught:
        server_address(text)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@given(st.text(max_size=40) | st.from_regex(r"\Ahttps?://[a-z0-9.\[\]:-]{0,12}:[0-9]{0,6}/?\Z"))
def test_any_text_is_an_address_or_a_clear_refusal(text: str) -> None:
    try:
        address = server_address(text)
    except ValueError:
        return
    assert server_address(address) == address


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=30))
def test_an_address_is_wanted_or_left_by_the_last_word_said(words: list[tuple[bool, int]]) -> None:
    wishes, last = FleetRequests(), {}
    for joins, number in words:
        before = asdict(wishes)
        if joins:
            changed = wishes.join(str(number))
        else:
            changed = wishes.leave(str(number), None)
        last[str(number)] = joins
        assert changed == (asdict(wishes) != before)
    assert set(wishes.wanted) == {url for url, joins in last.items() if joins}
    assert set(wishes.left) == {url for url, joins in last.items() if not joins}
    assert len(wishes.wanted + wishes.left) == len(last)
    assert FleetRequests(**asdict(wishes)) == wishes


def test_the_lists_are_bounded_and_strangers_cannot_leave() -> None:
    wishes = FleetRequests([str(number) for number in range(MAX_SERVERS)])
    with pytest.raises(FleetFullError, match="/fleet/leave"):
        wishes.join("one more")
    with pytest.raises(UnknownServerError, match="GET /fleet"):
        wishes.leave("typo", [ONE])
    wishes.leave(ONE, [ONE])
    assert wishes.left == [ONE]


def test_tables_of_several_publishers_stand_side_by_side_while_they_are_fresh() -> None:
    def row(port: int, version: int) -> dict[str, Any]:
        return {"url": f"http://h:{port}", "weight_version": version}

    table = (
        FleetStatus()
        .updated("a", [row(1, 1), row(2, 1)], 100.0, 5.0)
        .updated("b", [row(3, 1)], 101.0, 9e8)
    )
    assert table.urls() == ["http://h:1", "http://h:2", "http://h:3"]
    table = table.updated("a", [row(1, 2)], 102.0, 7.0)
    assert sorted(table.urls() or ()) == ["http://h:1", "http://h:3"]
    assert (table.published, table.age(102.5)) == (7.0, 0.5), "the wall clock is for people alone"
    table = table.updated("b", [row(1, 3)], 103.0, 8.0)  # has taken it over
    assert table.servers == [row(1, 3)]
    assert table.updated("b", [], 103.0 + FORGET_SECONDS, 8.0).servers == []
    assert table.updated("", [row(4, 1)], 104.0, 0.0).urls() == ["http://h:1", "http://h:4"]


def test_a_refused_method_is_answered_with_all_that_the_path_has(service: Service) -> None:
    for path, methods in (("/fleet", "GET, POST"), ("/fleet/join", "POST"), ("/stats", "GET")):
        refused = service.http.request("DELETE", path)
        assert refused.status_code == 405
        assert refused.headers["Allow"] == methods
        assert refused.json() == {"detail": "Method Not Allowed"}


def test_the_trainers_table_is_told_and_forgotten(service: Service) -> None:
    assert service.get("/fleet") == {
        "servers": [],
        "wanted": [],
        "left": [],
        "keyed": False,
        "published": None,
        "published_ago": None,
    }
    uuid = service.post("/register", trainer())["uuid"]
    before = time.time()
    table = [entry(ONE), entry(TWO, "quarantined", weight_version=None, reason="silent " * 1000)]
    told = service.post("/fleet", {"servers": table, "uuid": uuid})
    assert told == {"status": "success", "wanted": [], "left": [], "keyed": False}
    answer = service.get("/fleet")
    table[1]["reason"] = table[1]["reason"][:4096]
    assert answer["servers"] == table
    assert before - 1 <= answer["published"] <= time.time() + 1
    service.post("/register", trainer())
    refused = service.http.post("/fleet", json={"servers": [], "uuid": uuid})
    assert refused.status_code == 409
    assert service.get("/fleet")["servers"] == table, (
        "the trainer that was superseded no longer tells"
    )
    service.http.get("/reset_data")
    assert service.get("/fleet")["published"] is None


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/fleet/join", {"url": "gpu-2:9001"}, "write http://HOST:PORT"),
        ("/fleet/join", {}, "Field required"),
        ("/fleet/leave", {"url": "http://gpu-2/v1"}, "names no port"),
        ("/fleet", {"servers": [entry(ONE, "fine")]}, "'good'"),
        ("/fleet", {"servers": [entry(ONE), entry(ONE + "/")]}, "listed twice"),
        ("/fleet", {}, "Field required"),
    ],
)
def test_what_is_no_fleet_is_refused_by_its_name(
    service: Service, path: str, body: dict[str, Any], says: str
) -> None:
    answer = service.http.post(path, json=body)
    assert answer.status_code == 422, answer.text
    assert says in answer.json()["detail"][0]["msg"]
    assert service.get("/fleet")["published"] is None


def test_what_is_wanted_survives_a_kill(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", str(tmp_path / "a.db")).start()
    for path, url in (("join", ONE), ("join", TWO + "/"), ("join", ONE), ("leave", ONE)):
        answer = service.post(f"/fleet/{path}", {"url": url})
    assert answer == {"status": "success", "wanted": [TWO], "left": [ONE], "keyed": False}
    service.post("/fleet", {"servers": [entry(TWO)]})
    unknown = service.http.post("/fleet/leave", json={"url": "http://typo:9001"})
    assert unknown.status_code == 404
    assert TWO in unknown.json()["detail"]
    service.signal(signal.SIGKILL)
    service.start()
    never = {"published": None, "published_ago": None}
    assert (
        service.get("/fleet")
        == {"servers": [], "wanted": [TWO], "left": [ONE], "keyed": False} | never
    )
    assert service.signal(signal.SIGTERM) == 0
    # With a key: trainers send their keys to what is wanted, so what anyone may have asked for
    # before is left out.
    keyed = Service(
        tmp_path, "--store", str(tmp_path / "a.db"), environ={"ROLLOUT_API_KEY": "s3cret"}
    ).start()
    keyed.http.headers["Authorization"] = "Bearer s3cret"
    assert (
        keyed.get("/fleet") == {"servers": [], "wanted": [], "left": [ONE], "keyed": True} | never
    )
    assert "asked to join before this service had a key" in keyed.log.read_text()
    assert keyed.post("/fleet/join", {"url": TWO})["wanted"] == [TWO]
    assert keyed.signal(signal.SIGTERM) == 0
