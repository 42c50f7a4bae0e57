"""Access: every caller with the key, without a key programs of this machine, and never a page in
another user's browser.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests
from starlette.datastructures import Headers

from atroposlib.cli.run_api import parse_arguments
from atroposlib.web.middleware import Access, HTTPRefusal
from tests.atroposlib.cli.test_run_api import run
from tests.atroposlib.service.conftest import Service, group

BROWSER = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"
ELSEWHERE = "https://elsewhere.example"


def fetched(site: str, mode: str, destination: str) -> dict[str, str]:
    """Headers of a present-day browser."""
    return {
        "sec_fetch_site": site,
        "sec_fetch_mode": mode,
        "sec_fetch_dest": destination,
        "user_agent": BROWSER,
    }


def allowed(access: Access, path: str = "/reset_data", method: str = "GET", **headers: str) -> bool:
    named = Headers(
        {"host": "localhost:8000"}
        | {name.replace("_", "-"): value for name, value in headers.items() if value}
    )
    try:
        access.check(method, path, named)
    except HTTPRefusal as error:
        return error.status != 403
    return True


@pytest.mark.parametrize(
    ("host", "bound_to", "is_allowed"),
    [
        ("localhost", "127.0.0.1", True),
        ("LOCALHOST:8000", "127.0.0.1", True),
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", True),
        ("[::1]:8000", "127.0.0.1", True),
        ("elsewhere.example", "127.0.0.1", False),
        ("elsewhere.example:8000", "127.0.0.1", False),
        ("localhost.elsewhere.example", "127.0.0.1", False),
        ("127.0.0.1.elsewhere.example", "127.0.0.1", False),
        ("10.0.0.5", "127.0.0.1", False),
        ("10.0.0.5:8000", "10.0.0.5", True),
        ("node7:8000", "node7", True),
        ("10.0.0.5:8000", "0.0.0.0", True),
        ("[2001:db8::1]:8000", "::", True),
        ("elsewhere.example", "0.0.0.0", False),
        ("rollouts", "0.0.0.0", True),
        ("Rollouts:8000", "127.0.0.1", True),
        ("[", "0.0.0.0", False),
        ("@localhost@elsewhere.example", "127.0.0.1", False),
    ],
)
def test_the_host_must_be_a_name_of_this_service(
    host: str, bound_to: str, is_allowed: bool
) -> None:
    assert (
        allowed(Access(bound_to=bound_to, hosts=frozenset({"rollouts"})), host=host) == is_allowed
    )


def test_a_host_that_cannot_be_read_is_refused_even_if_the_own_address_is_not_known() -> None:
    assert not allowed(Access(), host="[")
    assert allowed(Access(), host="127.0.0.1")


def test_a_client_of_http_1_0_names_no_host() -> None:
    Access(bound_to="127.0.0.1").check("GET", "/status", Headers({}))


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({"user_agent": "python-requests/2.32"}, True),
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:9000"}, False),
        ({"origin": ELSEWHERE}, False),
        ({"origin": "null"}, False),
        ({"sec_fetch_site": "cross-site", "user_agent": BROWSER}, False),
        ({"sec_fetch_site": "same-site", "user_agent": BROWSER}, False),
        (fetched("same-origin", "cors", "empty"), True),  # a script of our own page, such as /docs
        (fetched("same-origin", "same-origin", "empty"), True),
        (
            fetched("none", "navigate", "document"),
            False,
        ),  # a link in an e-mail, a bookmark, a typed address
        (fetched("same-origin", "navigate", "document"), False),  # a link that our own page shows
        (fetched("same-origin", "no-cors", "image"), False),  # an image that our own page shows
        (fetched("same-origin", "navigate", "iframe"), False),
        (fetched("cross-site", "navigate", "document"), False),
        ({"sec_fetch_site": "none"}, False),
        ({"sec_fetch_site": "same-origin", "user_agent": BROWSER}, False),
        ({"sec_fetch_mode": "navigate"}, False),
        ({"sec_fetch_dest": "image"}, False),
        ({"sec_fetch_mode": "cors", "user_agent": "node"}, True),  # Node's fetch, a program
        ({"sec_fetch_mode": "cors", "user_agent": BROWSER}, False),
        ({"user_agent": BROWSER}, False),  # an image of another page, over plain HTTP
    ],
)
def test_a_page_cannot_wipe_a_run(headers: dict[str, str], is_allowed: bool) -> None:
    assert allowed(Access(), **headers) == is_allowed


@pytest.mark.parametrize(
    "path",
    [
        "/reset_data",
        "/batch",
        "/status-env",
        "/batch/",
        "/RESET_DATA",
        "//reset_data",
        "/of_tomorrow",
    ],
)
def test_a_link_reaches_only_what_is_listed_as_reading(path: str) -> None:
    assert not allowed(Access(), path, **fetched("none", "navigate", "document"))
    assert not allowed(Access(), path, "HEAD", **fetched("none", "navigate", "document"))
    assert allowed(Access(), path)


@pytest.mark.parametrize(
    "path", ["/", "/status", "/stats", "/fleet", "/evaluations", "/reference", "/docs"]
)
def test_a_link_may_be_followed_to_read(path: str) -> None:
    assert allowed(Access(), path, **fetched("none", "navigate", "document"))
    assert not allowed(Access(), path, "POST", **fetched("none", "navigate", "document"))


@pytest.mark.parametrize(
    ("method", "mode"), [("POST", "navigate"), ("DELETE", "cors"), ("POST", "no-cors")]
)
def test_a_post_must_come_from_our_own_page(method: str, mode: str) -> None:
    own = fetched("same-origin", mode, "empty") | {"origin": "http://localhost:8000"}
    assert allowed(Access(), "/register", method, **own)
    assert not allowed(Access(), "/register", method, **(own | {"sec_fetch_site": "cross-site"}))
    assert not allowed(Access(), "/register", method, **(own | {"origin": "null"}))
    assert not allowed(Access(), "/register", method, **fetched("none", mode, "empty"))


def test_a_person_may_look() -> None:
    assert allowed(Access(), "/stats", user_agent=BROWSER)
    assert not allowed(Access(), "/batch", user_agent=BROWSER)
    assert allowed(Access(), "/fleet", user_agent=BROWSER)
    assert not allowed(Access(), "/fleet", "POST", user_agent=BROWSER)


def test_with_a_key_only_the_key_counts() -> None:
    access = Access("s3cret", "127.0.0.1")
    access.check(
        "GET",
        "/batch",
        Headers({"host": "x", "origin": ELSEWHERE, "authorization": "Bearer s3cret"}),
    )
    access.check("GET", "/", Headers({"host": "x"}))
    with pytest.raises(HTTPRefusal, match="no bearer token") as caught:
        access.check("GET", "/reset_data", Headers({"host": "localhost"}))
    assert caught.value.status == 401


# ---- the process ----


async def asked_by_aiohttp(url: str) -> int:
    """Return the status that aiohttp gets."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status


def test_pages_are_refused_and_old_clients_are_not(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", "memory", "--allow-host", "rollouts.example").start()
    service.begin()
    service.post("/scored_data", group())
    address = str(service.http.base_url)
    for headers in (
        {"host": "elsewhere.example"},
        {"origin": ELSEWHERE},
        {"sec-fetch-site": "cross-site"},
    ):
        for method, path in (
            ("GET", "/reset_data"),
            ("GET", "/batch"),
            ("POST", "/scored_data"),
            ("OPTIONS", "/scored_data"),
        ):
            answer = httpx.request(method, f"{address}{path}", headers=headers, timeout=120)
            assert answer.status_code == 403, answer.text
            assert next(iter(headers.values())) in answer.json()["detail"]
            assert "access-control-allow-origin" not in answer.headers
    assert service.get("/status") == {"current_step": 0, "queue_size": 1}, (
        "nothing was wiped, nothing handed out"
    )
    named = service.http.get("/status", headers={"host": f"rollouts.example:{service.port}"})
    assert named.status_code == 200
    assert "access-control-allow-origin" not in named.headers
    link = {
        name.replace("_", "-"): value
        for name, value in fetched("none", "navigate", "document").items()
    }
    for path in ("/reset_data", "/batch"):
        answer = service.http.get(path, headers=link)
        assert answer.status_code == 403
        assert "follows a link" in answer.json()["detail"]
    assert service.get("/status") == {"current_step": 0, "queue_size": 1}, (
        "a link in an e-mail reaches nothing"
    )
    assert asyncio.run(asked_by_aiohttp(f"{address}/status")) == 200
    assert requests.get(f"{address}/info", timeout=120).status_code == 200
    assert urllib.request.urlopen(f"{address}/batch", timeout=120).status == 200
    curl = shutil.which("curl")
    assert (
        curl is None
        or subprocess.check_output([curl, "-s", f"{address}/reset_data"]) == b"Reset successful"
    )
    assert service.http.get("/reset_data").text == "Reset successful"
    service.signal(signal.SIGTERM)


def test_a_key_from_a_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    key.chmod(0o600)
    service = Service(
        tmp_path,
        "--store",
        "memory",
        "--api-key-file",
        str(key),
        environ={"ROLLOUT_API_KEY": "other"},
    )
    service.forked = False
    service.start()
    assert (
        service.http.get("/status", headers={"authorization": "Bearer s3cret"}).status_code == 200
    )
    assert service.http.get("/status", headers={"authorization": "Bearer other"}).status_code == 401
    assert service.process is not None
    for shown in (
        Path(f"/proc/{service.process.pid}/cmdline").read_bytes().decode(),
        service.log.read_text(),
    ):
        assert "s3cret" not in shown
    assert "chmod 600" not in service.log.read_text()
    service.signal(signal.SIGTERM)


def test_a_key_on_the_command_line_is_warned_of_and_never_shown(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", "memory", "--api-key", "s3cret").start()
    service.signal(signal.SIGTERM)
    log = service.log.read_text()
    assert "every user of this machine can see --api-key in ps" in log
    assert "s3cret" not in log


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ("two words", "no header can carry"),
        ("schlüssel", "no header can carry"),
    ],
)
def test_a_key_file_that_holds_none_is_one_clear_line(
    tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    done = run("--api-key-file", str(path), "--store", "memory", "--port", "0")
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last
    assert not content or content not in done.stdout


def test_help_shows_no_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLOUT_API_KEY", "s3cret")
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    shown = capsys.readouterr().out
    assert "--api-key-file" in shown
    assert "s3cret" not in shown


def test_a_proxy_is_named_by_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(
        ["--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "::1"]
    ).trusted_proxy == ["10.0.0.0/8", "::1"]
    for wrong in "*", "10.0.0.1/8", "proxy.example":
        with pytest.raises(SystemExit):
            parse_arguments(["--trusted-proxy", wrong])
        assert f"--trusted-proxy: {wrong!r}" in capsys.readouterr().err
