"""Addresses of the inference servers from the rollout service, to which the trainer publishes them."""

from __future__ import annotations

import logging
from typing import Annotated

import httpx
from pydantic import AfterValidator, BaseModel

from atroposlib.web.addresses import server_address
from atroposlib.web.connections import direct_async_client

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
                logger.info("the rollout service at %s tells of the fleet again", self.url)
                self._wrong = ""
            return answer.addresses()
        if wrong != self._wrong:
            logger.info(
                "the rollout service at %s does not tell of the fleet: %s; the servers stay",
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
