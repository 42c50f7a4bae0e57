"""Keys of the servers that the trainer asks: read from variables, and shown nowhere."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence

from pydantic import SecretStr

logger = logging.getLogger(__name__)

SECRETS = {"vllm_api_key": "VLLM_API_KEY", "atropos_api_key": "ROLLOUT_API_KEY"}
"""Option -> the variable that it is read from. Their values stand in no help, log, dump or
message."""


def from_variable(option: str) -> Callable[[], SecretStr | None]:
    """Make a function that reads an option's variable, and returns None if it is not set or empty."""

    def read() -> SecretStr | None:
        value = os.environ.get(SECRETS[option])
        if not value:
            return None
        return SecretStr(value)

    return read


def revealed(secret: SecretStr | None) -> str | None:
    """Return the text of a secret option; None if it is not given or empty."""
    if not secret:
        return None
    return secret.get_secret_value()


class ServerKeys:
    """The rule for which addresses may get the key of the vLLM servers.

    It may be sent to servers in this process's options, and to servers that a rollout service with
    a key names. At a service without a key, anyone may ask for any address.
    """

    def __init__(self, has_key: bool, named: Iterable[str]) -> None:
        """
        Args:
            has_key: there is a key to be sent.
            named: addresses from own options, as `http://host:port`.
        """
        self._has_key, self._named, self._refused = has_key, set(named), set[str]()

    def trusted(self, urls: Sequence[str], keyed: bool) -> list[str]:
        """Return the addresses that may join, and log each of the others once.

        Args:
            urls: from the rollout service.
            keyed: it needed this process's key.
        """
        if not self._has_key or keyed:
            return list(urls)
        for url in urls:
            if url not in self._named | self._refused:
                self._refused.add(url)
                logger.warning(
                    "[Fleet] %s does not join: the rollout service that names it needs no key, so "
                    "%s is not sent there. Add it to --vllm-servers, or give service and trainer "
                    "a key (%s)",
                    url, SECRETS["vllm_api_key"], SECRETS["atropos_api_key"],
                )  # fmt: skip
        return [url for url in urls if url in self._named]


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line in which the values of secret options are `…`."""
    flags, shown, before = {"--" + name.replace("_", "-") for name in SECRETS}, [], ""
    for word in words:
        flag, equals, _ = word.partition("=")
        if before in flags:
            shown.append("…")
        elif equals and flag in flags:
            shown.append(f"{flag}=…")
        else:
            shown.append(word)
        before = word
    return shown


def refuse_key_in_command(command: str) -> None:
    """Raise ValueError if the command of a server holds its key, which every user can read in `ps`."""
    try:
        words = shlex.split(command)
    except ValueError:
        return  # an error when the command is put together
    if any(word.split("=")[0] == "--api-key" for word in words):
        raise ValueError(
            "all users can read --api-key in `ps`; leave it out and set VLLM_API_KEY, which that "
            "server gets"
        )
