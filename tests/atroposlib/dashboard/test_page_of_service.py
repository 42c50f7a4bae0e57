"""The page as a real service serves it: its access, the headers for browsers, and the events of its
stream.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.dashboard.app import RunPage, make_offline_app
from atroposlib.dashboard.auth import PageAuth
from atroposlib.dashboard.live.hub import Hub
from tests.atroposlib.service.conftest import Service, group, trainer
from tests.inference_standin import Standin

KEY = "correct-horse-battery-staple"
PROXY = "127.0.0.8"
"""An address of this machine, as 127.0.0.9 and all others that begin so: a caller from it is
another one than a caller from 127.0.0.1.
"""
PAGES = ("/ui", "/ui/weights", "/ui/history")
DATA = (
    "page",
    "runs",
    "names",
    "series?names=reward_mean",
    "series.csv",
    "events",
    "evaluations",
    "stack",
    "weights",
)
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'"
NAVIGATION = {
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
    "sec-fetch-site": "cross-site",
}


class Events:
    """The server-sent events of one open page."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.iter_lines()

    def next(self, *names: str) -> tuple[str, Any]:
        """The next event of these names; others are passed over.

        The client's own limit ends the wait.
        """
        name = ""
        for line in self.lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name in names:
                return name, json.loads(line.removeprefix("data: "))
        raise AssertionError(f"the stream ended before any of {names}")

    def next_of_kind(self, kind: str) -> Any:
        """The next thing that happened, of this kind."""
        while (event := self.next("event")[1])["kind"] != kind:
            continue
        return event


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("keyed")
    flags = ("--store", "memory", "--host", "127.0.0.1", "--trusted-proxy", PROXY)
    service = Service(folder, *flags, environ={"ROLLOUT_API_KEY": KEY}).start()
    yield service
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]
    assert "ERROR" not in service.log.read_text()
    assert "see the run at http://127.0.0.1" in service.log.read_text()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "a-run"


@pytest.fixture(scope="module")
def keyless(run_folder: Path) -> Iterator[Service]:
    run_folder.mkdir()
    store = str(run_folder / "rollouts.db")
    service = Service(run_folder, "--store", store, "--run-folder", str(run_folder)).start()
    yield service
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]
    assert "ERROR" not in service.log.read_text()


@pytest.fixture
def browser(keyed: Service) -> Iterator[httpx.Client]:
    """Keeps cookies, and sends the origin of its posts, as browsers do."""
    url = f"http://127.0.0.1:{keyed.port}"
    with httpx.Client(base_url=url, headers={"Origin": url}, timeout=120) as client:
        yield client


def sign_in(
    browser: httpx.Client,
    key: str = KEY,
    following: str = "/ui/weights",
    forwarded: dict[str, str] | None = None,
) -> httpx.Response:
    return browser.post("/ui/sign-in", data={"key": key, "next": following}, headers=forwarded)


def asking_from(address: str, service: Service) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{service.port}",
        transport=httpx.HTTPTransport(local_address=address),
        timeout=120,
    )


def test_nobody_sees_anything_without_the_key(keyed: Service, browser: httpx.Client) -> None:
    for path in PAGES:
        answer = browser.get(f"{path}?run=live")
        assert answer.status_code == 303
        assert answer.headers["location"] == f"/ui/sign-in?next={path}%3Frun%3Dlive"
    for path in (*DATA, "stream"):
        answer = browser.get(f"/ui/api/{path}")
        assert answer.status_code == 401, path
        assert answer.json()["sign_in"] == "/ui/sign-in"
    assert browser.get("/ui/sign-in").status_code == 200
    assert browser.get("/ui/static/app.js").status_code == 200
    assert browser.get("/stats").status_code == 401, "the service's own routes are as they were"
    assert (
        browser.get("/ui/api/page", headers={"Authorization": f"Bearer {KEY}"}).json()["key"]
        is True
    )


def test_signing_in_and_out(browser: httpx.Client) -> None:
    wrong = sign_in(browser, "wrong")
    assert wrong.status_code == 401
    assert "not the service" in wrong.text
    assert not browser.cookies
    for elsewhere in ("https://evil.example/", "//evil.example", "/status", "/ui/../stats"):
        assert sign_in(browser, following=elsewhere).headers["location"] == "/ui"
    right = sign_in(browser)
    assert right.status_code == 303
    assert right.headers["location"] == "/ui/weights"
    words = {word.strip().lower() for word in right.headers["set-cookie"].split(";")}
    assert {"httponly", "samesite=lax", "path=/ui", "max-age=43200"} <= words
    assert KEY not in right.headers["set-cookie"]
    for path in PAGES:
        assert browser.get(path).status_code == 200
    cookie = dict(browser.cookies)
    with browser.stream("GET", "/ui/api/stream") as response:
        events = Events(response)
        assert events.next("hello")[1]["live"] is True
        assert browser.post("/ui/sign-out").status_code == 303
        assert events.next("bye")[1] == {"reason": "signed_out"}
    assert browser.get("/ui").status_code == 303
    again = httpx.get(f"{browser.base_url}/ui/api/page", cookies=cookie, timeout=120)
    assert again.status_code == 401, "a copy is worthless too"


def test_another_page_can_neither_sign_in_nor_out(browser: httpx.Client) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "null"},
    ):
        for path in ("/ui/sign-in", "/ui/sign-out"):
            answer = browser.post(path, data={"key": KEY}, headers=headers)
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers


def test_every_answer_tells_the_browser_what_it_may_do(browser: httpx.Client) -> None:
    paths = [
        "/ui/sign-in",
        "/ui",
        "/ui/static/app.js",
        "/ui/static/../page.py",
        "/ui/static/nothing.js",
        "/ui/api/runs",
    ]
    sign_in(browser)
    for path in [
        *paths,
        "/ui/api/nothing",
        "/ui/nothing",
        *(f"/ui/api/{name}" for name in DATA),
        *PAGES,
    ]:
        headers = browser.get(path).headers
        assert headers["content-security-policy"].startswith(POLICY), path
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin", (
            "without one, browsers hide the Origin of a form too"
        )
        assert headers["cache-control"] == (
            "no-cache" if path == "/ui/static/app.js" else "no-store"
        ), path
    assert browser.get("/ui/nothing").status_code == 404
    first = browser.get("/ui/static/app.js")
    assert (
        browser.get(
            "/ui/static/app.js", headers={"If-None-Match": first.headers["etag"]}
        ).status_code
        == 304
    )
    assert 'href="/ui/rollouts?run=live~1"' in browser.get("/ui?run=live%7E1").text, (
        "as a chat may have written it"
    )
    names = ",".join(f"{'x' * 30}{number}" for number in range(50))
    packed = browser.get(f"/ui/api/series?names={names}")
    assert (packed.headers["content-encoding"], len(packed.json()["series"])) == ("gzip", 50)
    assert (
        "content-encoding"
        not in browser.get(
            f"/ui/api/series?names={names}", headers={"Accept-Encoding": "br"}
        ).headers
    )
    bad = browser.get("/ui/api/series?names=a&points=1")
    assert (bad.status_code, bad.json()) == (
        400,
        {"error": "points=1: Input should be greater than or equal to 10"},
    )
    assert "no run 'gone'" in browser.get("/ui/api/names?run=gone").json()["error"]


def test_too_many_wrong_keys_have_to_wait_wherever_they_say_that_they_come_from(
    keyed: Service,
) -> None:
    with asking_from("127.0.0.9", keyed) as browser:
        made_up = [{"X-Forwarded-For": f"203.0.113.{number}"} for number in range(11)]
        assert [sign_in(browser, "wrong", forwarded=one).status_code for one in made_up] == [
            401
        ] * 10 + [429]
        waiting = sign_in(browser)
        assert waiting.status_code == 429, "even with the right one"
        assert 0 < int(waiting.headers["retry-after"]) <= 61


def test_a_proxy_that_was_named_says_who_asks_and_how(keyed: Service) -> None:
    one, other = (
        {"X-Forwarded-For": f"made-up, 198.51.100.{number}", "X-Forwarded-Proto": "https"}
        for number in (1, 2)
    )
    with asking_from(PROXY, keyed) as proxy:
        assert [sign_in(proxy, "wrong", forwarded=one).status_code for _ in range(11)] == [
            401
        ] * 10 + [429]
        signed_in = sign_in(proxy, forwarded=other)
        assert (signed_in.status_code, "; Secure" in signed_in.headers["set-cookie"]) == (303, True)
        assert "strict-transport-security" in signed_in.headers
    with asking_from("127.0.0.7", keyed) as nobody:
        assert "; Secure" not in sign_in(nobody, forwarded=other).headers["set-cookie"]


def test_without_a_key_only_this_machine_by_its_own_name(keyless: Service) -> None:
    page = keyless.http
    assert page.get("/ui").status_code == 200
    assert page.get("/ui", headers=NAVIGATION).status_code == 200, "a link is followed"
    assert page.get("/ui/sign-in").headers["location"] == "/ui"
    far = ({"x-forwarded-for": "127.0.0.1, 198.51.100.1"}, {"forwarded": "for=198.51.100.1"})
    for headers in (
        *far,
        {"host": "evil.example"},
        {"host": "evil.example:80"},
        {"host": ""},
        {"origin": "http://evil.example"},
    ):
        answer = page.get("/ui/api/stack", headers=headers)
        assert answer.status_code == 403, headers
        assert "error" in answer.json()
    assert page.get("/ui", headers=NAVIGATION | {"sec-fetch-dest": "iframe"}).status_code == 403
    assert page.get("/ui/api/runs", headers=NAVIGATION).status_code == 403
    assert page.get("/ui", headers={"host": "evil.example"}).status_code == 403
    assert page.get("/ui", headers={"x-forwarded-for": "::1"}).status_code == 200, (
        "a proxy of this machine's own people"
    )


def row(step: int, **more: Any) -> str:
    return (
        json.dumps(
            {"step": step, "reward_mean": step / 10, "kl": float("nan"), "checksum": f"c{step}"}
            | more
        )
        + "\n"
    )


def test_an_open_page_is_told_what_is_new(keyless: Service, run_folder: Path) -> None:
    figures = run_folder / "trainer"
    figures.mkdir()
    metrics = figures / "metrics.jsonl"
    metrics.write_text(row(1) + row(2))
    (figures / "evaluations.jsonl").write_text(
        json.dumps({"id": 1, "time": 5.0, "name": "sums", "metrics": {"a": 0.5}}) + "\n"
    )
    server = Standin()
    server.control(serving=True, version=3, epoch=7)
    server.start()
    with keyless.http.stream("GET", "/ui/api/stream", timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = Events(response)
        assert events.next("hello")[1]["rows"] == 2
        keyless.post(
            "/register",
            trainer(model="m", log_dir=str(figures), inference_servers=[server.url, "nonsense"]),
        )
        keyless.get("/batch")
        stack = events.next("stack")[1]
        while not [one for one in stack["servers"] if one["health"] == "good"]:
            stack = events.next("stack")[1]
        assert stack["trainer"]["model"] == "m"
        assert [one["url"] for one in stack["servers"]] == [server.url]
        with metrics.open("a") as file:
            file.write(row(3, batches_skipped=1) + '{"step": 4, "rew')
        told = events.next("rows")[1]
        assert [one["step"] for one in told["new"]] == [3]
        assert told["new"][0]["kl"] is None
        events.next_of_kind("skipped_batch")
        metrics.write_text(row(1) + row(2, reward_mean=9.0))
        again = events.next("rows")[1]
        assert again["new"] is None
        assert again["generation"] != told["generation"]
        server.bridge |= {"failures": 1, "last_error": "a shape differs"}
        assert "a shape differs" in events.next_of_kind("refused_update")["text"]
        server.stop()
        events.next_of_kind("server_lost")
        faults = keyless.get("/ui/api/stack")["faults"]
        assert (faults[0]["part"], faults[0]["severity"]) == (f"server {server.url}", "error")
        assert faults[0]["remedy"]

    expect_figures(keyless)
    (run,) = keyless.get("/ui/api/runs")["runs"]
    assert (run["id"], run["model"], run["state"], run["steps"]) == ("live", "m", "running", 2)


def expect_figures(keyless: Service) -> None:
    """Expect the figures of the two steps and of the server's update."""
    series = keyless.get("/ui/api/series", names="reward_mean,kl,unknown")
    assert series["exact"] is True
    assert series["step"] == [1, 2]
    assert series["series"]["reward_mean"] == {"mean": [0.1, 9.0], "low": None, "high": None}
    assert series["series"]["kl"]["mean"] == [None, None]
    assert (
        keyless.http.get("/ui/api/series.csv?names=reward_mean").text
        == "step,reward_mean\r\n1,0.1\r\n2,9.0\r\n"
    )
    weights = keyless.get("/ui/api/weights")
    (version,) = weights["servers"][0]["history"]
    assert (version["version"], version["epoch"], version["checksum"], version["gap"]) == (
        3,
        7,
        "abc",
        0.25,
    )
    assert version["seconds"] == {"paused": 0.01, "halted": 0.25}
    assert [one["checksum"] for one in weights["updates"]] == ["c1", "c2"]
    assert keyless.get("/ui/api/evaluations")["evaluations"][0]["metrics"] == {"a": 0.5}


def test_a_post_is_seen_on_the_stack(keyless: Service) -> None:
    with keyless.http.stream("GET", "/ui/api/stream", timeout=60) as response:
        events = Events(response)
        events.next("hello")
        keyless.post("/scored_data", group())
        while events.next("stack")[1]["queue"]["groups"] != 1:
            pass


async def test_a_page_that_fails_says_so_and_keeps_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = RunPage([tmp_path], PageAuth(), Hub())

    def fail(run: str) -> Any:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(page.runs, "get", fail)
    transport = httpx.ASGITransport(make_offline_app(page), client=("127.0.0.1", 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser:
        answer = await browser.get("/ui/api/names")
    assert (answer.status_code, "log" in answer.json()["error"]) == (500, True)
    assert "mistake" not in answer.text
    assert answer.headers["content-security-policy"].startswith(POLICY)
