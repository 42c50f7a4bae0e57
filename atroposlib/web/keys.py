"""Keys of the services that an environment calls: their sources, and the places that must not show
them.

An environment variable is the best source, because only its owner can see it: the list of processes
shows flags. From every source, a key stays out of `--help`, logs, the W&B configuration and dumps
of settings.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

SERVICE_KEY = "ROLLOUT_API_KEY"
"""The rollout service's, under the name that the service itself reads."""
VLLM_KEY = "VLLM_API_KEY"
"""A vLLM server's, under the name that vLLM itself reads."""
OPENAI_KEY = "OPENAI_API_KEY"
TEACHER_KEY = "TEACHER_API_KEY"
"""A teacher's, which may be on a server of others."""
PROXY_KEY = "ATROPOS_PROXY_API_KEY"
"""The managed-server proxy's."""

PLACEHOLDERS = ("", "x", "EMPTY")
"""Values that users give if a client insists on a key and there is none."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")

SECRET_NAME = re.compile(
    r"(api_?key|access_?key|secret(_?key)?|password|(auth|access|hf)_token|credentials)$",
    re.IGNORECASE,
)


def given_or_variable(key: str | SecretStr | None, variable: str | None) -> str | None:
    """Return the key, or else the variable's; None if there is neither."""
    if isinstance(key, SecretStr):
        key = key.get_secret_value()
    if key is not None and key not in PLACEHOLDERS:
        return key
    return os.environ.get(variable or "") or None


def bearer(key: str | None) -> dict[str, str]:
    """Return the header that carries a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def host_of(url: str | None) -> str:
    """Return the host in an address; empty if there is none."""
    return urlsplit(url or "").hostname or ""


def is_secret(name: str, info: FieldInfo | None = None) -> bool:
    """Return whether a setting is secret: it is excluded from dumps, is a `SecretStr`, or has the
    name of a key.
    """
    kept_out = info is not None and (
        info.exclude is True or SecretStr in (info.annotation, *get_args(info.annotation))
    )
    return kept_out or SECRET_NAME.search(name) is not None


def open_settings(model: BaseModel) -> dict[str, Any]:
    """Return the settings as JSON without keys, for W&B and other readers.

    Fields of subclasses count too.
    """
    return {
        name: value
        for name, value in model.model_dump(mode="json").items()
        if not is_secret(name, type(model).model_fields.get(name))
    }


def all_settings(model: BaseModel) -> dict[str, Any]:
    """Return the settings with their keys, to make another model of them. Never show them."""
    return {name: getattr(model, name) for name in type(model).model_fields} | (
        model.model_extra or {}
    )


def shown(name: str, value: Any, info: Mapping[str, FieldInfo]) -> str:
    """Return a setting's value for `--help` and messages."""
    if value in (None, ""):
        return "none"
    return "hidden" if is_secret(name, info.get(name)) else str(getattr(value, "value", value))
