"""Pages of rollouts: of files and folders, and of what a service got last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.app.application import make_app as make_service
from atroposlib.api.app.service import RolloutService
from atroposlib.api.store.store import MemoryStore
from atroposlib.cli import view_run
from atroposlib.cli.view_run import beginning, group_files, make_app, write_page
from atroposlib.errors import UsageError
from tests.atroposlib.api.conftest import free_port, group


class Letters:
    """A tokenizer: token 97 is an a."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def write(path: Path, *groups: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in groups))
    return path


def test_files_and_folders_become_pages(tmp_path: Path) -> None:
    tokens = write(tmp_path / "run" / "deep" / "tokens.jsonl", group(2, mark=ord("<")))
    messages = write(tmp_path / "run" / "messages.jsonl", {"messages": ["plain", "other"], "scores": [1, 0]})
    write(tmp_path / "run" / "metrics.jsonl", {"step": 1, "loss": 0.5})
    assert list(group_files([tmp_path / "run"])) == [tokens, messages]
    assert "&lt;" in write_page(tokens, Letters()).read_text()
    assert "plain" in write_page(messages, None).read_text()
    assert "plain" in write_page(messages, Letters()).read_text(), "there are no tokens"
    with pytest.raises(UsageError, match=r"tokens\.jsonl holds tokens and no messages.*--tokenizer"):
        write_page(tokens, None)


def test_what_holds_no_groups_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write(tmp_path / "broken.jsonl", group(2), {"scores": [1]})
    page = tmp_path / "broken.html"
    page.write_text("of before")
    with pytest.raises(UsageError, match=r"broken\.jsonl has a line that is no group: line 2"):
        write_page(broken, Letters())
    assert page.read_text() == "of before"
    metrics = write(tmp_path / "metrics" / "metrics.jsonl", {"step": 1})
    for path in (metrics, metrics.parent):
        with pytest.raises(UsageError, match="holds no groups"):
            list(group_files([path]))
    for arguments, words in ([], "--tokenizer"), ([str(tmp_path / "nowhere")], "not there"), (["--group-size", "0"], "above 0"):
        with pytest.raises(SystemExit) as ended:
            view_run.main(arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


async def test_a_page_shows_what_the_service_got_last() -> None:
    service = make_service(RolloutService(MemoryStore()))

    async def page(upstream: httpx.AsyncClient, host: str = "127.0.0.1:9001") -> httpx.Response:
        app = make_app(upstream, Letters(), group_size=1, max_token_len=3)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.get("/", headers={"user-agent": "Mozilla/5.0"})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://127.0.0.1") as upstream:
        assert "Nothing has been posted" in (await page(upstream)).text
        posted = group(2, length=5, mark=ord("x")) | {"scores": [0.5, 0.125]}
        (await upstream.post("/scored_data", json=posted)).raise_for_status()
        shown = (await page(upstream)).text
        assert "score 0.5" in shown
        assert "score 0.125" not in shown
        assert (await page(upstream, "evil.example")).status_code == 403
        assert (await upstream.get("/status")).json()["queue_size"] == 1, "a trainer gets it all the same"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port()}", trust_env=False) as nobody:
        away = await page(nobody)
    assert away.status_code == 502
    assert "does not answer" in away.text


def test_the_beginning_of_a_group_is_one_too() -> None:
    whole = group(3, length=4, weight_versions=[1, 2, 3], messages=["a", "b", "c"], env_id=7)
    assert beginning(whole, 9, 9) == whole
    cut = beginning(whole, 2, 3)
    assert (cut["weight_versions"], cut["env_id"], cut["messages"]) == ([1, 2], 7, None)
    assert [len(row) for row in cut["tokens"] + cut["masks"] + cut["inference_logprobs"]] == [3] * 6
