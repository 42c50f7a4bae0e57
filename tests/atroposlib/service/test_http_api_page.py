"""docs/http-api.md: its examples, typed from the page, answer as the page shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.atroposlib.service.conftest import Service
from tests.conftest import ROOT, Processes
from tests.pages import code_blocks, section_of

PAGE = ROOT / "docs" / "http-api.md"
PORT = "8000"


def matches(shown: Any, answered: Any) -> bool:
    """Compare an answer with the page, where … stands for any text or number."""
    if shown == "…":
        return isinstance(answered, str | int | float)
    if isinstance(shown, dict) and isinstance(answered, dict):
        return shown.keys() == answered.keys() and all(
            matches(shown[key], answered[key]) for key in shown
        )
    if isinstance(shown, list) and isinstance(answered, list):
        return len(shown) == len(answered) and all(
            matches(*pair) for pair in zip(shown, answered, strict=True)
        )
    return bool(shown == answered)


def values(text: str) -> list[Any]:
    """Return the JSON values that stand one behind the other in a text."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def test_examples_of_the_service_answer_as_the_page_shows(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (_, start), *blocks = code_blocks(section_of(PAGE, "try-it").text)
    command, redirection = start.strip().split(" > ")
    port = free_port()
    words = command.replace(PORT, str(port)).split()
    assert words[0] == "run-api"
    assert redirection.endswith("&")
    processes.start("service", [sys.executable, "-m", "atroposlib.cli.run_api", *words[1:]])
    processes.wait_for_http(f"http://127.0.0.1:{port}/status", 60)

    compared, printed = 0, ""
    for language, text in blocks:
        if language == "bash":
            done = subprocess.run(
                ["bash", "-e", "-c", text.replace(f":{PORT}/", f":{port}/")],
                cwd=tmp_path, env={**os.environ, "no_proxy": "*"}, capture_output=True, text=True, check=True, timeout=60,
            )  # fmt: skip
            printed = done.stdout
            continue
        shown, answered = values(text), values(printed)
        assert matches(shown, answered), f"the page shows {shown}, the service answered {answered}"
        compared += len(shown)
    assert compared == 7
    batch = json.loads((tmp_path / "batch.json").read_text())
    assert (batch["batch_id"], len(batch["batch"]), batch["environments"]) == (1, 1, {"0": "tour"})


def test_every_route_of_the_service_is_on_the_page(service: Service) -> None:
    page = PAGE.read_text(encoding="utf-8")
    routes = service.get("/openapi.json")["paths"]
    assert len(routes) > 15
    assert [path for path in routes if f"{path}`" not in page] == []
