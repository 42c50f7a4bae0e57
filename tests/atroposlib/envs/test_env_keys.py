"""Keys reach only the services that they are for; proxies to the outside stay out of connections
between ours.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field, SecretStr

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.runner.command_line import main, merge, parse_flags, read_config
from atroposlib.errors import UsageError
from atroposlib.inference.server_manager import ServerManager, at_url, create_proxy_session
from atroposlib.service_client import RolloutServiceClient
from atroposlib.web.keys import given_or_variable
from environments.arithmetic_server import ArithmeticEnv
from tests.atroposlib.envs.scripted_env import ScriptedEnv
from tests.http_server import Answer, HttpServer, Request

KEY = "sk-nobody-reads-this"
VARIABLES = ("ROLLOUT_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY", "ATROPOS_PROXY_API_KEY")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class JudgedConfig(BaseEnvConfig):
    """Brings a key of its own, as environments do that ask another model for a judgement."""

    judge_api_key: str = KEY
    judge_secret: SecretStr = SecretStr(KEY)
    other_judge: SecretStr | None = SecretStr(KEY)
    max_token: int = 5
    note: str = Field(default="shown")


class Judged(ScriptedEnv):
    """An environment whose defaults hold keys."""

    @classmethod
    def config_init(cls) -> Any:
        return JudgedConfig(rollout_server_api_key=KEY), [
            APIServerConfig(base_url="http://x", api_key=KEY)
        ]


# ---- who reads them
# ----------------------------------------------------------------------------------------------------


def test_help_shows_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Judged, ["--help"]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert KEY not in shown
    for flag in (
        "--openai.api_key",
        "--env.rollout_server_api_key",
        "--env.judge_api_key",
        "--env.judge_secret",
        "--env.other_judge",
    ):
        assert re.search(rf"{re.escape(flag)} TEXT [^()]*\(default: hidden\)", shown)
    assert "--env.note TEXT (default: shown)" in shown
    assert "--env.max_token N (default: 5)" in shown
    assert "$ROLLOUT_API_KEY" in shown


def test_an_environment_without_the_key_of_its_server_names_the_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(request: Request) -> Answer:
        return (401, {"error": "Unauthorized"}) if request.path == "/v1/models" else (200, {})

    with HttpServer(answer) as server:
        words = ["evaluate", "--openai.base_url", server.url, "--openai.server_type", "vllm"]
        assert main(ArithmeticEnv, words) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert '/v1/models failed (401: {"error": "Unauthorized"})' in line
    assert "as --openai.api_key or, of a vLLM server, as VLLM_API_KEY" in line
    assert "tokenizer" not in line


def test_wandb_gets_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Recording:
        @staticmethod
        def init(**fields: Any) -> None:
            seen.update(fields)

    monkeypatch.setitem(sys.modules, "wandb", Recording)
    env = ScriptedEnv([])
    env.config = JudgedConfig(rollout_server_api_key=KEY, use_wandb=True)
    env._runner.reports.start_wandb("project", "group")
    assert seen["config"]["note"] == "shown"
    assert KEY not in json.dumps(seen["config"])
    assert "judge_api_key" not in seen["config"]


@pytest.mark.parametrize(
    "model", [BaseEnvConfig(rollout_server_api_key=KEY), APIServerConfig(api_key=KEY)]
)
def test_no_dump_and_no_text_of_a_configuration_holds_its_key(model: Any) -> None:
    dumps = [model.model_dump(), model.model_dump(mode="json")]
    texts = [repr(model), str(model), model.model_dump_json(), *map(yaml.dump, dumps)]
    assert not [text for text in texts if KEY in text]
    field = "api_key" if isinstance(model, APIServerConfig) else "rollout_server_api_key"
    assert given_or_variable(getattr(model, field), None) == KEY, "it is there all the same"


@pytest.mark.parametrize("api_key", [f"{{{KEY}: 1}}", f"[{KEY}]"])
def test_an_error_about_a_key_does_not_show_it(api_key: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"openai:\n  api_key: {api_key}\n")
    with pytest.raises(UsageError, match=r"^--openai\.api_key: ") as refusal:
        merge(
            BaseEnvConfig(),
            APIServerConfig(),
            parse_flags([], BaseEnvConfig),
            read_config(str(file)),
        )
    assert KEY not in str(refusal.value)
    file.write_text(f"openai:\n  api_key: {KEY}: {KEY}\n")
    with pytest.raises(UsageError, match=r"line 2, column \d+$") as refusal:
        read_config(str(file))
    assert KEY not in str(refusal.value)


def test_the_defaults_keys_outlive_the_merge_with_flags_and_yaml() -> None:
    env, servers = Judged.config_init()
    merged = merge(
        env,
        servers,
        parse_flags(["--env.group_size", "3", "--openai.timeout", "7"], JudgedConfig),
        {},
    )
    assert (merged.env.rollout_server_api_key, merged.env.judge_api_key) == (SecretStr(KEY), KEY)
    assert merged.servers[0].api_key == KEY  # type: ignore[index]
    assert at_url(APIServerConfig(api_key=KEY), "http://y").api_key == KEY


# ---- where they come from
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_type", "base_url", "given", "expected"),
    [
        ("vllm", "http://node7:9001/v1", "", "vllm"),
        ("vllm", "http://node7:9001/v1", "x", "vllm"),
        ("vllm", "http://node7:9001/v1", "own", "own"),
        ("openai", "http://localhost:9001/v1", "EMPTY", "vllm"),
        ("openai", "", None, "openai"),
        ("openai", "https://api.openai.com/v1", "", "openai"),
        ("openai", "https://api.openai.com.example/v1", "", None),
        ("openai", "http://node7:9001/v1", "", None),
        ("sglang", "http://localhost:9001/v1", "", None),
        ("trl", "http://localhost:9001", "", None),
    ],
)
def test_a_servers_key_comes_from_the_variable_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
    server_type: Any,
    base_url: str,
    given: str | None,
    expected: str | None,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "vllm")
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    config = APIServerConfig(server_type=server_type, base_url=base_url, api_key=given)
    server = ServerManager([config]).servers[0]
    assert server.api_key == expected
    assert server.openai.api_key == (expected or "x")
    assert server.http.headers.get("Authorization") == (f"Bearer {expected}" if expected else None)
    assert config.api_key == given, "the configuration stays as it was given"


def test_the_services_key_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**settings: Any) -> str | None:
        header: str | None = ScriptedEnv(
            [], **settings
        )._runner.connections.service._http.headers.get("Authorization")
        return header

    assert sent() is None
    monkeypatch.setenv("ROLLOUT_API_KEY", KEY)
    assert sent() == f"Bearer {KEY}"
    assert sent(rollout_server_api_key="flag") == "Bearer flag"


# ---- proxies of the world outside
# --------------------------------------------------------------------------------------


def any_route(request: Request) -> Answer:
    """Answer for every route that the clients below call."""
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    service = {"data": [{"id": "m"}], "uuid": "u", "nodes": []}
    completion = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
    return 200, service | completion | {"choices": [choice]}


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on this machine, which must stay reachable though a proxy is set and missing."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HttpServer(any_route, keep_alive=True) as server:
        yield server.url


async def test_no_client_goes_to_a_server_of_ours_by_a_proxy(address: str) -> None:
    service = RolloutServiceClient(address, timeout=60.0)
    assert (await service.get("/info"))["id"] == "c"
    await service.close()
    for server_type in ("vllm", "openai"):
        manager = ServerManager(
            [APIServerConfig(server_type=server_type, base_url=f"{address}/v1", health_check=False)]
        )  # type: ignore[arg-type]
        assert await manager.servers[0].served_model() == {"id": "m"}
        assert (await manager.chat_completion(messages=[{"role": "user", "content": "?"}])).choices[
            0
        ].message.content == "hi"
        await manager.close()
    session = await create_proxy_session(address)
    assert await session.fetch_state() == {"nodes": []}
    await session.cleanup()
    env = ScriptedEnv([], service_timeout=60.0)
    env.server = ServerManager([APIServerConfig(server_type="vllm", base_url=f"{address}/v1")])
    assert await asyncio.to_thread(env._runner.connections.served_model) == "m"


@pytest.mark.parametrize(
    ("server_type", "base_url", "proxied"),
    [
        ("openai", "https://api.openai.com/v1", True),
        ("openai", "http://localhost:9001/v1", False),
        ("vllm", "http://node7:9001/v1", False),
    ],
)
def test_only_an_endpoint_that_may_be_outside_is_reached_by_a_proxy(
    server_type: Any, base_url: str, proxied: bool
) -> None:
    server = ServerManager([APIServerConfig(server_type=server_type, base_url=base_url)]).servers[0]
    assert server.http.trust_env is server.openai._client.trust_env is proxied
