"""A person watches while an inference server and the service are killed. The page names the missing
part, its time and the remedy, until they are back.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from example_trainer.child_processes.processes import ManagedProcess
from tests import inference_standin
from tests.atroposlib.service.conftest import Service, environment, trainer
from tests.conftest import Processes
from tests.headless_browser import LIVE, UNANSWERED, Visit

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

LOST = "document.body.dataset.connection === 'lost'"


def alert(seen: Visit, text: str) -> Locator:
    return seen.page.get_by_role("alert").filter(has_text=text)


def since(fault: Locator) -> str:
    """Return the time at which the page dates a fault."""
    found = re.search(r"Since (\d\d:\d\d:\d\d)\.", fault.inner_text())
    assert found is not None, fault.inner_text()
    return found[1]


def expect_a_hang_to_be_noticed(service: Service, sleeper: Visit) -> None:
    """The service hangs, and its connections stay: a page without a message for half a minute
    tries a new one.
    """
    sleeper.page.clock.install()
    sleeper.open("/ui")
    sleeper.until(LIVE)
    assert service.process is not None
    service.process.send_signal(signal.SIGSTOP)
    sleeper.page.clock.fast_forward(40_000)
    sleeper.until(LOST)
    service.process.send_signal(signal.SIGCONT)
    sleeper.until(LIVE)
    sleeper.page.context.close()


def expect_the_service_to_be_gone(seen: Visit) -> Locator:
    """Return the alert about it."""
    seen.until(LOST)
    mute = alert(seen, "service: It does not answer.")
    mute.wait_for()
    assert "scripts/start.sh --resume service" in mute.inner_text()
    part = seen.page.get_by_role("listitem", name="service", exact=True)
    assert part.get_attribute("data-state") == "gone"
    assert "does not answer" in seen.page.locator("#headline").inner_text()
    return mute


def test_who_watches_sees_what_is_gone_since_when_and_what_to_do(
    tmp_path: Path, processes: Processes, free_port: Callable[[], int], visit: Callable[..., Visit]
) -> None:
    port = free_port()
    url = f"http://localhost:{port}"

    def start_server(instance: str) -> ManagedProcess:
        weights = {"instance": instance, "version": 3, "epoch": 7}
        command = inference_standin.command(port, serving=True, **weights)
        return processes.start("inference server", command)

    server = start_server("one")
    service = Service(
        tmp_path, "--store", str(tmp_path / "rollouts.db"), "--run-folder", str(tmp_path)
    ).start()
    try:
        service.post("/register", trainer(model="m", inference_servers=[url]))
        service.get("/batch")
        service.post("/register-env", environment())
        seen = visit(f"http://127.0.0.1:{service.port}")
        seen.expect(UNANSWERED)
        seen.open("/ui")
        seen.until(LIVE)
        headline = seen.page.locator("#headline")
        headline.filter(has_text="Training: 1 environment, 1 of 1 server well.").wait_for()

        expect_a_hang_to_be_noticed(service, visit(seen.origin))

        processes.kill(server)
        silent = alert(seen, f"vLLM server: {url} does not answer: connection refused.")
        silent.wait_for()
        began = since(silent)
        assert "scripts/start.sh --resume" in silent.inner_text()
        assert seen.page.get_by_role("listitem", name="vllm").get_attribute("data-state") == "gone"

        service.signal(signal.SIGKILL)
        mute = expect_the_service_to_be_gone(seen)

        service.start()
        seen.until(LIVE)
        mute.wait_for(state="detached")
        late = visit(seen.origin)  # a person opens the page only now
        late.expect(UNANSWERED)
        late.open("/ui")
        for one in seen, late:
            silent = alert(one, f"{url} does not answer")
            silent.wait_for()
            assert since(silent) == began, "and not since the service is there again"
        headline.filter(has_text="1 thing to look at.").wait_for()

        start_server("two")
        for one in seen, late:
            alert(one, url).wait_for(state="detached")
        headline.filter(has_text="Training: 1 environment, 1 of 1 server well.").wait_for()
        server_said = (f"{url} does not answer", f"{url} answers again")
        for happened in (*server_said, "the rollout service was restarted"):
            late.page.get_by_role("row").filter(has_text=happened).first.wait_for()
    finally:
        service.signal(signal.SIGTERM)
