"""The vLLM server and the rollout service, which may not import each other, refuse the same
requests of browsers.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.web import middleware as of_service
from vllm_patching.server import browsers as of_vllm

HEADERS = st.fixed_dictionaries(
    {
        "host": st.sampled_from(("", "localhost:9001", "evil.example")),
        "origin": st.sampled_from(
            (None, "null", "http://localhost:9001", "http://evil.example", "https://board.example")
        ),
        "site": st.sampled_from((None, "none", "same-origin", "same-site", "cross-site", "?")),
        "mode": st.sampled_from(
            (None, "navigate", "cors", "no-cors", "same-origin", "websocket", "?")
        ),
        "destination": st.sampled_from(
            (None, "empty", "document", "image", "iframe", "websocket", "?")
        ),
        "is_browser": st.booleans(),
        "origins": st.sampled_from((frozenset(), frozenset({"https://board.example"}))),
    }
)


@given(HEADERS, st.sampled_from(("GET", "HEAD", "POST", "DELETE", "OPTIONS")))
def test_both_servers_refuse_the_same(headers: dict[str, object], method: str) -> None:
    one = of_service.BrowserHeaders(**headers)  # type: ignore[arg-type]
    other = of_vllm.BrowserHeaders(**headers)  # type: ignore[arg-type]
    assert one.foreign_page() == other.foreign_page()
    assert one.unproven_change(method, "/x") == other.unproven_change(method, "/x")


@given(HEADERS)
def test_nothing_that_a_link_sends_may_change_anything(headers: dict[str, object]) -> None:
    sent = headers | {"site": "none", "mode": "navigate", "origin": None}
    for method in ("GET", "HEAD", "POST"):
        assert of_service.BrowserHeaders(**sent).unproven_change(method, "/x")  # type: ignore[arg-type]


@given(st.sampled_from(("GET", "POST")), st.text(max_size=9))
def test_a_program_may_change_everything(method: str, host: str) -> None:
    assert of_service.BrowserHeaders(host).unproven_change(method, "/x") == ""
