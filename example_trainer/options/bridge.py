"""How vLLM gets the weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator

from atroposlib.web.addresses import HostName, authority, host_and_port
from example_trainer.api_keys import from_variable, refuse_key_in_command
from example_trainer.options.section import Section, split_commas


class BridgeOptions(Section):
    """Weight bridge"""

    weight_bridge_mode: Literal["none", "shared_vllm", "lora_only", "parameter_server"] = Field(
        "none",
        description="how vLLM gets the new weights: from checkpoints, directly, as LoRA adapters, or by a parameter server",
    )
    parameter_servers: list[str] = Field(
        [], description="parameter_server: host:port of each of them"
    )
    push_every: int = Field(
        1, ge=1, description="parameter_server: push every so many steps, and after the last one"
    )
    use_shared_memory: bool = Field(
        False, description="shared_vllm: broadcast the weights (trainer on other GPUs than vLLM)"
    )
    single_copy: bool = Field(
        False, description="shared_vllm: train in vLLM's own memory (trainer on vLLM's GPUs)"
    )
    colocate: bool = Field(
        False,
        description="take turns with vLLM (--colocate too) on one GPU: one copy of the weights, fresh rollouts alone",
    )
    vllm_host: HostName = Field("localhost", description="vLLM server's host")
    vllm_port: int = Field(9001, ge=1, le=65535, description="vLLM server's port")
    vllm_servers: list[str] = Field(
        [],
        description="host:port of every vLLM server, if there are several; instead of vllm-host and vllm-port",
    )
    weight_transfer: Literal["auto", "direct", "overlapped"] = Field(
        "auto",
        description="broadcast: into a paused vLLM's live weights, or beside them while it generates; auto: if there is room",
    )
    min_servers: int = Field(
        1,
        ge=1,
        description="broadcast: train on while so many vLLM servers are good; with fewer, wait for --service-timeout",
    )
    server_patience: float = Field(
        10.0,
        gt=0,
        description="broadcast: seconds that one server may keep the others waiting before it is left out",
    )
    vllm_api_key: SecretStr | None = Field(
        default_factory=from_variable("vllm_api_key"),
        description="bearer token of the vLLM server; better as a variable, which other users cannot see",
    )
    vllm_restart_interval: int = Field(
        3,
        ge=0,
        description="mode none: restart vLLM on a new checkpoint every N steps, no more than max-staleness; "
        "0: neither start nor restart it",
    )
    vllm_command: str | None = Field(
        None,
        min_length=1,
        description="what starts that server, with {model}, {name} and {port}, and {version} and {epoch} if wanted; "
        "not given: this project's own server",
    )
    vllm_args: str = Field(
        "",
        description='further flags for that server, in quotes: --vllm-args "--max-model-len 4096"',
    )
    vllm_gpus: str | None = Field(
        None,
        pattern=r"^\d+(,\d+)*$",
        description="GPUs of that server, such as 0,1, as in CUDA_VISIBLE_DEVICES; not given: those that the trainer sees and "
        "does not use, else the trainer's",
    )
    vllm_start_timeout: float = Field(
        600.0, gt=0, description="seconds that server may take to load and answer"
    )
    bridge_timeout: float = Field(
        120.0, gt=0, description="seconds that each phase of a weight update may take"
    )

    @field_validator("vllm_servers", "parameter_servers", mode="before")
    @classmethod
    def _split_servers(cls, value: Any) -> Any:
        return split_commas(value)

    @field_validator("vllm_servers", "parameter_servers")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        return checked_addresses(value)

    @field_validator("vllm_command", "vllm_args")
    @classmethod
    def _no_key_in_a_command(cls, value: str | None) -> str | None:
        refuse_key_in_command(value or "")
        return value

    @property
    def vllm_addresses(self) -> list[tuple[str, int]]:
        """Host, as it stands in a URL, and port of each vLLM server."""
        return list(map(host_and_port, self.vllm_servers)) or [(self.vllm_host, self.vllm_port)]


def checked_addresses(value: list[str]) -> list[str]:
    """Return addresses of servers as `host:port`.

    Raises ValueError if one is not an address, or comes twice.
    """
    servers = [authority(*host_and_port(server)) for server in value]
    if len(set(servers)) != len(servers):
        raise ValueError(f"{', '.join(value)} names a server twice")
    return servers
