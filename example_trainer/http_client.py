"""The HTTP client with which the trainer talks to its own servers."""

from __future__ import annotations

import httpx

from atroposlib.web.connections import LIMITS, end_slow_answer


def direct_client(url: str, timeout: float, api_key: str | None = None) -> httpx.Client:
    """A client of one of the stack's servers, which is reached directly whatever HTTP_PROXY and its
    like say.

    A proxy is for the world outside: it does not reach this machine's or cluster's addresses, and
    prompts, rewards and keys are none of its business. Certificates of one's own (SSL_CERT_FILE)
    are heeded. Threads may share it.

    Args:
        url: what every path is put behind.
        timeout: seconds for each phase of a request, unless the request says otherwise.
        api_key: bearer token, if the server asks for one.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx.HTTPTransport(
        trust_env=True, limits=LIMITS
    )  # of the environment it reads the certificates only
    hooks = {"response": [end_slow_answer]}
    return httpx.Client(
        base_url=url,
        headers=headers,
        timeout=timeout,
        transport=transport,
        trust_env=False,
        event_hooks=hooks,
    )
