"""All inference servers of one environment: their addresses, and the calls that environments make
on them.

The pool of a server decides which one answers. With `FleetFollower` the trainer publishes the
servers at the rollout service. `ServerHarness` answers from a table instead.
"""

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Annotated, Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import AfterValidator, BaseModel, Field

from atroposlib.errors import UsageError
from atroposlib.inference.chat_template import checked_messages
from atroposlib.inference.client import (
    APIServer,
    APIServerConfig,
    InferenceCalls,
    OpenAIServer,
    ReasoningConfig,
    ServerBaseline,
    ServerPool,
    SGLangServer,
    Split,
    TrlVllmServer,
    VLLMServer,
    WarnsOfUnknownKeys,
)
from atroposlib.inference.generation import Generation, current_versions
from atroposlib.inference.managed_server import (
    DummyManagedServer,
    ManagedServer,
    SequenceNode,
    node_of,
)
from atroposlib.web.addresses import HttpAddress, server_address
from atroposlib.web.connections import direct_async_client
from atroposlib.web.keys import PROXY_KEY, SERVICE_KEY, all_settings, given_or_variable
from atroposlib.wire import StrictNumbers

logger = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""Seconds between two requests to the service."""
ASK_TIMEOUT = 10.0


class FleetFollower:
    """A client of GET /fleet of one rollout service.

    Args:
        url: the service's address.
        api_key: bearer token, if the service requires one.
        every: seconds between two requests.
    """

    def __init__(self, url: str, api_key: str | None = None, every: float = ASK_SECONDS):
        self.url, self.every, self._has_key = url.rstrip("/"), every, bool(api_key)
        self.keyed = False
        """The last answer came from a service that requires the key, so that only holders of the key
        wrote the addresses."""
        self._http = direct_async_client(self.url, ASK_TIMEOUT, api_key)
        self._wrong = ""

    async def ask(self) -> list[str] | None:
        """Return the addresses of the servers that have the trainer's weights, or will again.

        None if the service does not answer or its trainer has not published any: all servers stay.
        """
        try:
            response = await self._http.get("/fleet")
            response.raise_for_status()
            answer = FleetAnswer.model_validate_json(response.content)
            self.keyed = self._has_key and answer.keyed
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            wrong = f"/fleet answered {status}"
            if status == 404:
                wrong += "; is it an earlier version?"
        except httpx.HTTPError as error:
            wrong = f"no answer to /fleet ({type(error).__name__})"
        except ValueError as error:
            wrong = f"/fleet answered something else: {' '.join(str(error).split())}"
        else:
            if self._wrong:
                logger.info("the rollout service at %s lists the fleet again", self.url)
                self._wrong = ""
            return answer.addresses()
        if wrong != self._wrong:
            logger.info(
                "the rollout service at %s does not list the fleet: %s; the servers stay",
                self.url,
                wrong,
            )
        self._wrong = wrong
        return None

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()


class FleetServer(BaseModel):
    """A server in an answer of GET /fleet."""

    url: Annotated[str, AfterValidator(server_address)]
    standing: str


class FleetAnswer(BaseModel):
    """The part of an answer of GET /fleet that environments use."""

    published: float | None
    servers: list[FleetServer]
    left: list[Annotated[str, AfterValidator(server_address)]] = []
    keyed: bool = False

    def addresses(self) -> list[str] | None:
        """Return the addresses to follow; None if the trainer has published none.

        A joining server is left out, because it still serves other weights. A server that is away
        or in quarantine stays: the pool polls it.
        """
        if self.published is None:
            return None
        standings = {server.url: server.standing for server in self.servers}
        return [
            url
            for url, standing in standings.items()
            if standing != "joining" and url not in self.left
        ]


def same_address(one: str, other: str) -> bool:
    """Return whether two addresses, each with or without /v1, are of the same server."""
    return _bare(one) == _bare(other)


def _bare(address: str) -> str:
    bare = address.rstrip("/").removesuffix("/v1")
    try:
        return server_address(bare)
    except ValueError:
        return bare


class ServerHarness(InferenceCalls):
    """Gives back what was set for exactly the same messages or prompt; anything else is a KeyError
    that shows the request.
    """

    by_text = True
    """Managed servers send it prompts as text."""

    def __init__(self) -> None:
        self.responses: dict[str, Any] = {}

    def conv_to_dictkey(self, input_message: list[dict[str, Any]]) -> str:
        return json.dumps(input_message, sort_keys=True, default=str)

    async def update_weight(self, weight: float) -> None:
        """Nothing to share out."""

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        return metrics_dict or {}

    def set_desired_response(
        self, input_message: list[dict[str, Any]], desired_response: ChatCompletion
    ) -> None:
        self.responses[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Completion) -> None:
        self.responses[f"prompt:{input_message}"] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[str],
    ) -> None:
        self.responses[f"tokens:{prompt}"] = (
            prompt_tokens,
            output_tokens_list,
            output_logprobs_list,
            finish_reasons,
        )

    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        prompt = fields.get("prompt", "")
        keys = {
            "_chat_completion_wrapper": self.conv_to_dictkey(fields.get("messages", [])),
            "_completion_wrapper": f"prompt:{prompt}",
            "_generate_wrapper": f"tokens:{prompt}",
        }
        key = keys[method]
        if key not in self.responses:
            raise KeyError(f"no response was set for {key}")
        response = self.responses[key]
        return Generation(*response) if isinstance(response, tuple) else response


__all__ = ["APIServer", "APIServerConfig", "ServerBaseline", "ServerManager", "ServerManagerConfig"]


SERVER_CLASSES: dict[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
}
ALLOW_DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
LOCAL_PORTS = range(9004, 9008)


class ServerManagerConfig(WarnsOfUnknownKeys, StrictNumbers):
    """Settings of the set of servers: flags without a namespace, or `--server.<name>`."""

    slurm: bool = Field(
        default=False, description="Find the servers on the nodes of this Slurm job"
    )
    testing: bool = Field(default=False, description="Answer from a table instead of a server")
    max_n_completions: int = Field(
        default=8, ge=1, description="Split requests for more completions, to spread the load"
    )
    proxy_url: HttpAddress | None = Field(
        default=None, description="Address of a proxy for managed servers"
    )
    follow_fleet: bool = Field(
        default=False,
        description="Ask the rollout service which inference servers the trainer has, and use those",
    )


class ServerManager(InferenceCalls):
    """The servers, and the calls that environments make on them.

    Args:
        configs: one entry per server, or several addresses with commas between them in one. A bare
            `ServerBaseline` stands for the local ports 9004 to 9007, or with Slurm for the nodes
            after the first `NUM_TRAINING_NODES`.
        server_class: a class of one's own, instead of `server_type`.
        testing: use a `ServerHarness`.
        max_n_completions: most completions per request.
        tool_parser: format of tool calls, given to managed servers.
    """

    def __init__(
        self,
        configs: ServerBaseline | APIServerConfig | list[APIServerConfig],
        server_class: type[APIServer] = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = 8,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
    ):
        self.max_n_completions = max_n_completions
        self.reasoning_config = reasoning_config
        self.proxy_url = proxy_url or os.environ.get("ATROPOS_PROXY_URL")
        self.use_proxy = use_proxy or bool(self.proxy_url)
        self.tool_parser = tool_parser
        self.beside: list[APIServer] = []
        """Servers of another role that rollouts use, such as a judge. They are closed with these, and
        the time of a rollout does not run while one is away."""
        self._servers: list[Any] = []
        self._retired: list[APIServer] = []
        self._following: asyncio.Task[None] | None = None
        self._configured: list[str] = []
        self._strangers: set[str] = set()
        self.follower: FleetFollower | None = None
        """Set before the first request: the servers are then the ones that the rollout service
        lists, once it lists any."""
        if testing:
            self.servers = [ServerHarness()]
            return
        if isinstance(configs, APIServerConfig):
            configs = [configs]
        if isinstance(configs, list) and not configs:
            raise UsageError("no inference server is configured: pass --openai.base_url")
        template = configs[0] if isinstance(configs, list) else configs
        if slurm or not isinstance(configs, list):
            urls = [f"http://localhost:{port}/v1" for port in LOCAL_PORTS]
            if slurm or "SLURM_JOB_NODELIST" in os.environ:
                urls = slurm_urls()
            configs = [at_url(template, url) for url in urls]
        self._own_class = None if inspect.isabstract(server_class) else server_class
        self.servers = [self._client(one) for config in configs for one in each_address(config)]
        self._configured = [server.root_url for server in self.servers]

    def _client(self, config: APIServerConfig) -> APIServer:
        server_class: type[APIServer] = self._own_class or SERVER_CLASSES[config.server_type]
        return server_class(config, reasoning_config=self.reasoning_config)

    @property
    def servers(self) -> list[Any]:
        """The servers. Assign a new list to change them; a former list is never changed."""
        return self._servers

    @servers.setter
    def servers(self, servers: list[Any]) -> None:
        former = [server for server in self._clients() if server not in servers]
        self._group(servers)
        for server in former:
            server.pool = ServerPool([server], server.role, server.address_flag)

    def _clients(self) -> list[APIServer]:
        return [server for server in self._servers if isinstance(server, APIServer)]

    def pools(self) -> list[ServerPool]:
        """Return one pool for each kind of server."""
        return list(dict.fromkeys(server.pool for server in self._clients()))

    def _group(self, servers: list[Any]) -> None:
        """Put servers of one kind into the pool that the first of them had before."""
        pools = {kind_of(server): server.pool for server in reversed(self._clients())}
        self._servers = servers
        for kind in dict.fromkeys(map(kind_of, self._clients())):
            group = [server for server in self._clients() if kind_of(server) == kind]
            pools.get(kind, group[0].pool).adopt(group)

    async def wait_until_well(self) -> None:
        """Return once a server of each kind is well. If the fleet is followed, first fetch its
        servers from the service.

        Raises:
            InferenceUnavailable: none was in time.
        """
        if self.follower is not None and (self._following is None or self._following.done()):
            await self._follow_once()
            self._following = asyncio.create_task(self._follow(), name="follows the fleet")
        for pool in self.pools():
            await pool.wait_until_well()

    async def _follow(self) -> None:
        assert self.follower is not None
        while True:
            await asyncio.sleep(self.follower.every)
            try:
                await self._follow_once()
            except Exception:  # The present servers stay in use.
                logger.exception("following the fleet failed; it is tried again")

    async def _follow_once(self) -> None:
        assert self.follower is not None
        addresses = await self.follower.ask()
        if addresses:
            self._use(addresses)
        for server in list(self._retired):
            if not server.pool.works_on(server):
                self._retired.remove(server)
                await server.close()

    def _use(self, addresses: list[str]) -> None:
        """Replace the servers by the ones at these addresses. Servers that stay keep their object."""
        old = self._clients()
        if not old:
            return  # answers come from a table
        addresses = self._trusted(addresses, old)
        if not addresses:
            return
        new = []
        for address in addresses:
            server = next((one for one in old if same_address(one.root_url, address)), None)
            if server is None:
                server = self._client(at_url(old[0].config, f"{address}/v1"))
                server.like(old[0])
            new.append(server)
        if new == old:
            return
        self._retired += [server for server in old if server not in new]
        self._group(new)
        logger.info(
            "the inference servers of the fleet are now: %s",
            ", ".join(server.root_url for server in new),
        )

    def _trusted(self, addresses: list[str], old: list[APIServer]) -> list[str]:
        """Leave out addresses to which no key of ours may go: anyone may have written them at a
        service without a key.
        """
        assert self.follower is not None
        if self.follower.keyed or not any(server.api_key for server in old):
            return addresses
        strangers = [
            url for url in addresses if not any(same_address(url, own) for own in self._configured)
        ]
        for url in strangers:
            if url not in self._strangers:
                self._strangers.add(url)
                logger.warning(
                    "the inference server %s is not used: the rollout service at %s names it and "
                    "needs no key. So the servers' key is not sent there. Add it to "
                    "--openai.base_url, or give the service a key (%s)",
                    url, self.follower.url, SERVICE_KEY,
                )  # fmt: skip
        return [url for url in addresses if url not in strangers]

    async def update_weight(self, weight: float) -> None:
        for server in self.servers:
            await server.update_weight(weight)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self.follower is not None:
            await self.follower.close()
        for pool in self.pools():
            await pool.close()
        for server in [*self.servers, *self._retired, *self.beside]:
            if isinstance(server, APIServer):
                await server.close()

    def _calls(self, split: Split) -> Any:
        """Return the pool for the next request: with servers of several kinds, the one with most
        room. With `testing`, it is the harness.
        """
        pools = self.pools()
        if not pools:
            return self.servers[0]
        return max(pools, key=lambda pool: pool.free(split))

    def pick(self, split: Split = "train") -> Any:
        """Return the best server for a conversation.

        If that server becomes unavailable, another one answers its requests.
        """
        calls = self._calls(split)
        if not isinstance(calls, ServerPool):
            return calls
        return calls.pick(split) or calls.servers[0]

    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        """Split a request for many completions into several, and join the answers in order."""
        n, most = fields.get("n") or 1, self.max_n_completions

        async def send(part: dict[str, Any]) -> Any:
            # The pool is chosen when the part before is under way.
            return await self._calls(fields.get("split", "train"))._request(method, part)

        if n <= most:
            return await send(fields)
        sizes = [min(most, n - start) for start in range(0, n, most)]
        parts = [send(fields | {"n": size}) for size in sizes]
        return joined_answer(await asyncio.gather(*parts))

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncGenerator[Any, None]:
        """Yield one server for several requests that belong together."""
        yield self.pick()

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """Yield a server that keeps the tokens, masks and logprobs of its sequences; see
        `ManagedServer`.

        An endpoint without token ids gives a `DummyManagedServer` when
        ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 is set.

        Raises:
            NotImplementedError: the endpoint gives no token ids and dummies are not allowed.
        """
        if self.use_proxy:
            if not self.proxy_url:
                raise UsageError(
                    "use_proxy is set but no address is: pass --proxy_url or set ATROPOS_PROXY_URL"
                )
            session = await create_proxy_session(
                self.proxy_url, base_url, self.tool_parser or "hermes"
            )
            try:
                yield session
            finally:
                await session.cleanup()
            return
        server = self.pick()
        managed: ManagedServer | DummyManagedServer
        if isinstance(server, OpenAIServer):
            if os.environ.get(ALLOW_DUMMY, "").lower() not in ("1", "true", "yes"):
                raise NotImplementedError(
                    "an OpenAI endpoint gives no token ids and logprobs to train on. Use a vLLM server with "
                    f"--openai.server_type vllm, or set {ALLOW_DUMMY}=1 to get placeholders, for evaluation only"
                )
            logger.warning(
                "token ids and logprobs are placeholders and not fit for training (%s is set)",
                ALLOW_DUMMY,
            )
            managed = DummyManagedServer(server, tokenizer)
        else:
            managed = ManagedServer(
                server,
                tokenizer,
                tool_parser=self.tool_parser,
                preserve_think_blocks=preserve_think_blocks,
            )
        try:
            yield managed
        finally:
            managed.reset()


def at_url(template: ServerBaseline, url: str) -> APIServerConfig:
    return APIServerConfig(**(all_settings(template) | {"base_url": url}))


def each_address(config: APIServerConfig) -> list[APIServerConfig]:
    """Return one configuration for each address in `base_url`, which may hold several with commas
    between them.

    Raises:
        UsageError: an address is there twice. The configuration has refused empty ones.
    """
    if "," not in (config.base_url or ""):
        return [config]
    addresses = [address.strip() for address in (config.base_url or "").split(",")]
    for index, address in enumerate(addresses):
        if any(same_address(address, other) for other in addresses[:index]):
            raise UsageError(
                f"--openai.base_url {config.base_url}: {address} is there twice; name each server once"
            )
    return [at_url(config, address) for address in addresses]


def kind_of(server: APIServer) -> tuple[type[APIServer], str]:
    """Return the key of servers that answer for each other."""
    return type(server), server.config.model_name


def slurm_urls() -> list[str]:
    """Return the servers on the nodes of this Slurm job that do not train: one per `INFER_TP` of eight GPUs,
    from port 9000.
    """
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        raise UsageError("--slurm: SLURM_JOB_NODELIST is not set; run inside a Slurm job")
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodelist],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    nodes = listed.stdout.split()
    if len(nodes) < 2:
        return [f"http://localhost:{port}/v1" for port in LOCAL_PORTS]
    training = int(os.environ.get("NUM_TRAINING_NODES", "1"))
    per_node = 8 // int(os.environ.get("INFER_TP", "1"))
    return [f"http://{node}:{9000 + i}/v1" for node in nodes[training:] for i in range(per_node)]


def joined_answer(parts: list[Any]) -> Any:
    """Return the answers to parts of a request as one answer."""
    first = parts[0]
    if isinstance(first, Generation):
        return joined_generation(parts)
    first.choices = [choice for part in parts for choice in part.choices]
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first


def joined_generation(parts: list[Generation]) -> Generation:
    """Return the completions of one prompt together. A field that one part lacks is None."""
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Generation)):
        rows = [getattr(part, name) for part in parts]
        if None not in rows:
            fields[name] = [entry for row in rows for entry in row]
    return Generation(**fields | {"prompt_tokens": parts[0].prompt_tokens})


PASSED_ON = (
    "messages",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
)


class ProxyManagedServer:
    """One session. `get_url` returns the OpenAI address for another program, and `fetch_state`
    reads that program's sequences.

    If the proxy has a key, the other program sends it as its OpenAI key: `$ATROPOS_PROXY_API_KEY`.
    """

    def __init__(
        self,
        proxy_url: str,
        session_uuid: str,
        model_name: str = "unknown",
        base_url: str | None = None,
        api_key: str | None = None,
    ):
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self.base_url = base_url
        self.nodes: list[SequenceNode] = []
        timeout = httpx.Timeout(1200.0, connect=5.0)
        self._http = direct_async_client(f"{self.proxy_url}/{session_uuid}", timeout, api_key)

    def get_url(self) -> str:
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Complete a chat, as `ManagedServer.chat_completion` does.

        Raises:
            UsageError: a message has a form that no prompt can hold, such as an image.
        """
        body = {name: kwargs[name] for name in PASSED_ON if kwargs.get(name) is not None}
        body["messages"] = checked_messages(kwargs["messages"])
        response = await self._http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        await self.fetch_state()
        return ChatCompletion.model_validate(response.json())

    async def completion(self, **kwargs: Any) -> Completion:
        raise NotImplementedError("the proxy speaks chat only: use chat_completion")

    def get_state(self) -> dict[str, Any]:
        """Return the sequences at the last completion of this client, or at the last `fetch_state`."""
        return {"nodes": list(self.nodes)}

    def node_of(self, answer: ChatCompletion, index: int = 0) -> SequenceNode:
        """Return the sequence that ends with a choice of an answer.

        Call `fetch_state` first for another program's answers.
        """
        return node_of(self.nodes, answer.id, index)

    async def fetch_state(self) -> dict[str, Any]:
        """Fetch all sequences of the session from the proxy, another program's too."""
        response = await self._http.get("/nodes")
        response.raise_for_status()
        self.nodes = [SequenceNode(**node) for node in response.json()["nodes"]]
        if record := current_versions.get():
            met = [node.weights for node in self.nodes if node.weights is not None]
            record.note([weights.version for weights in met], [weights.epoch for weights in met])
            if record.sampled is not None:
                for node in self.nodes:
                    record.sampled.note(
                        [],
                        [node.tokens],
                        [node.sampling],
                        [(node.metadata or {}).get("finish_reason")],
                    )
        return self.get_state()

    def reset(self) -> None:
        """Forget the sequences here; the proxy keeps its own until `cleanup`."""
        self.nodes = []

    async def cleanup(self) -> None:
        """End the session."""
        try:
            response = await self._http.delete(f"{self.proxy_url}/{self.session_uuid}")
        finally:
            await self._http.aclose()
        if response.status_code != 404:
            response.raise_for_status()

    async def __aenter__(self) -> "ProxyManagedServer":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cleanup()


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str = "hermes",
    track_tree: bool = False,
    model_name: str = "unknown",
) -> ProxyManagedServer:
    """Open a session at a proxy.

    Raises:
        httpx.HTTPError: the proxy does not answer, or refuses.
    """
    api_key = given_or_variable(None, PROXY_KEY)
    async with direct_async_client(proxy_url.rstrip("/"), 30.0, api_key) as http:
        body = {"tool_parser": tool_parser, "track_tree": track_tree, "base_url": base_url}
        response = await http.post("/sessions/create", json=body)
        response.raise_for_status()
    session = response.json()
    return ProxyManagedServer(
        proxy_url,
        session["uuid"],
        session.get("model_name", model_name),
        session.get("base_url"),
        api_key,
    )
