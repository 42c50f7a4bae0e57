"""The parameter server's options."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from atroposlib.web.addresses import HttpAddress, ListeningHost
from example_trainer.api_keys import from_variable, revealed
from example_trainer.config import Addresses, Names, Section


class ParameterServerOptions(Section):
    """Parameter server"""

    model_name: str = Field(
        description="folder of a Hugging Face checkpoint, or a model id; only its config.json is read"
    )
    host: ListeningHost | None = Field(
        None,
        description="address to listen on; not given: 127.0.0.1, or 0.0.0.0 with the key of the vLLM servers",
    )
    port: int = Field(9101, ge=1, le=65535, description="port to listen on")
    allow_host: Names = Field(
        [], description="further names by which this server may be called, without an API key"
    )
    vllm_servers: Addresses = Field(
        [], description="host:port of the vLLM servers that get weights; others may join later"
    )
    part: str = Field(
        "1/1",
        description="which of several parameter servers this is, as 2/3. That one serves every "
        "third of --vllm-servers from the second on, and its share of servers that "
        "join; all are given the same list",
    )
    atropos_url: HttpAddress | None = Field(
        None,
        description="rollout service: shows the fleet, and lists servers that join; not given: the "
        "fleet is --vllm-servers",
    )
    atropos_api_key: SecretStr | None = Field(
        default_factory=from_variable("atropos_api_key"),
        description="bearer token of the rollout service",
    )
    vllm_api_key: SecretStr | None = Field(
        default_factory=from_variable("vllm_api_key"),
        description="bearer token of the vLLM servers, which the trainer needs here as well",
    )
    pull_every: int = Field(
        1, ge=1, description="bring a vLLM server up to date when it is so many versions behind"
    )
    shards: int = Field(
        1, ge=1, description="processes on this machine that the parameters are spread over"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N: where the weights are held")
    num_threads: int | None = Field(
        None, ge=1, description="torch's CPU threads; not given: torch decides"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="that of the vLLM servers; auto: the checkpoint's on a machine with GPUs, else float32, as they choose",
    )
    weight_transfer: Literal["auto", "direct", "overlapped"] = Field(
        "auto",
        description="to the vLLM servers: into live weights, or beside them; auto: if there is room",
    )
    server_patience: float = Field(
        10.0, gt=0, description="seconds that one vLLM server may keep the others waiting"
    )
    bridge_timeout: float = Field(
        120.0, gt=0, description="seconds that each phase of a weight update may take"
    )
    rank_timeout: float = Field(300.0, gt=0, description="seconds that shards wait for each other")
    rendezvous_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port at which vLLM servers meet this one to receive; 0: any that is free",
    )
    log_dir: Path = Field(
        Path("logs"), description="folder for vllm_bridge_config.json (in parameter_server-PORT)"
    )

    @field_validator("part")
    @classmethod
    def _one_of(cls, value: str) -> str:
        number, _, count = value.partition("/")
        if not number.isdigit() or not count.isdigit() or not 1 <= int(number) <= int(count):
            raise ValueError("give its number and how many there are, as in 2/3")
        return value

    @property
    def address(self) -> str:
        """Where it listens. Without a key, an open port would let every host push weights."""
        return self.host or ("0.0.0.0" if revealed(self.vllm_api_key) else "127.0.0.1")

    @property
    def share(self) -> Share:
        """Which vLLM servers are this one's."""
        number, _, count = self.part.partition("/")
        return Share(
            int(number) - 1, int(count), [f"http://{server}" for server in self.vllm_servers]
        )


class Share:
    """The vLLM servers of one of several parameter servers.

    All that are given the same list agree, without a word.
    """

    def __init__(self, number: int, count: int, named: Sequence[str]) -> None:
        """
        Args:
            number, count: which one, from 0, of how many.
            named: addresses of all servers that the options name, in the order in which they are
                given to all.
        """
        self._number, self._count = number, count
        self._places = {url: place % count for place, url in enumerate(named)}

    def has(self, url: str) -> bool:
        """Return whether a server is this one's: by its place in the list, and if it is not in the
        list by its address.
        """
        by_address = int.from_bytes(hashlib.sha256(url.encode()).digest()[:8], "big") % self._count
        return self._places.get(url, by_address) == self._number

    def named(self) -> list[str]:
        """The servers of the list that are this one's."""
        return [url for url in self._places if self.has(url)]
