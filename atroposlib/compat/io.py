"""Reading HTTP answers."""

import logging
from typing import Any

module_logger = logging.getLogger(__name__)


async def parse_http_response(resp: Any, logger: logging.Logger | None = None) -> Any:
    """The JSON of an aiohttp response.

    Raises:
        Exception: the response's own, for a status of 400 or above or a body that is no JSON; its
            text is logged first.
    """
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        text = await resp.text()
        (logger or module_logger).error(
            "%s answered %s: %s",
            getattr(resp, "url", "?"),
            getattr(resp, "status", error),
            text[:500],
        )
        raise
