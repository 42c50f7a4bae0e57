"""Keys of the services that an environment calls: where they come from, and that nobody reads them who should not.

A key is best given by an environment variable, which only its owner can see: a flag stands in the list of processes. However
it was given, it is in no `--help`, no log, no W&B configuration and no dump of a configuration.
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
"""A teacher's, which may be on somebody else's server."""
PROXY_KEY = "ATROPOS_PROXY_API_KEY"
"""The managed-server proxy's."""

PLACEHOLDERS = ("", "x", "EMPTY")
"""Given where a client insists on a key and there is none."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")

SECRET_NAME = re.compile(r"(api_?key|access_?key|secret(_?key)?|password|(auth|access|hf)_token|credentials)$", re.IGNORECASE)


def given_or_variable(given: str | SecretStr | None, variable: str | None) -> str | None:
    """The key that was given, else the variable's; None where there is none."""
    if isinstance(given, SecretStr):
        given = given.get_secret_value()
    if given is not None and given not in PLACEHOLDERS:
        return given
    return (os.environ.get(variable) or None) if variable else None


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def host_of(url: str | None) -> str:
    """The host in an address; empty where there is none."""
    return urlsplit(url or "").hostname or ""


def is_secret(name: str, info: FieldInfo | None = None) -> bool:
    """Whether a setting holds what nobody else may read: it is kept out of dumps, is a `SecretStr`, or is named like a key."""
    kept_out = info is not None and (info.exclude is True or SecretStr in (info.annotation, *get_args(info.annotation)))
    return kept_out or SECRET_NAME.search(name) is not None


def open_settings(model: BaseModel) -> dict[str, Any]:
    """The settings as JSON, for W&B and other readers: without keys, those of a subclass included."""
    return {
        name: value
        for name, value in model.model_dump(mode="json").items()
        if not is_secret(name, type(model).model_fields.get(name))
    }


def all_settings(model: BaseModel) -> dict[str, Any]:
    """The settings as they are, keys included, to make another model of them. Not for readers."""
    return {name: getattr(model, name) for name in type(model).model_fields} | (model.model_extra or {})


def shown(name: str, value: Any, info: Mapping[str, FieldInfo]) -> str:
    """A setting's value for `--help` and messages."""
    if value in (None, ""):
        return "none"
    return "hidden" if is_secret(name, info.get(name)) else str(getattr(value, "value", value))
