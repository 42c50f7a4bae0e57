"""Limits of a client's connections to the servers of its run, and of the connections that servers
accept. Pure.

By default httpx keeps 20 idle connections for five seconds. Beyond that its pool (httpcore 1.0,
issue 1110 there) closes connections that look idle. A connection that the pool has just given to a
request looks idle until the request is written, so the pool sometimes closes a socket under a
request. The request then fails with "Bad file descriptor", or waits until its deadline. A pool that
never closes what the server holds open cannot do that.
"""

from __future__ import annotations

import httpx

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
"""A connection for each request at a time, kept until the server closes it."""

SERVER_KEEPS_SECONDS = 75
"""Time for which the stack's own servers hold an idle connection open. It is longer than most
training steps: a request at the end of this time finds its connection closed."""

LISTEN_BACKLOG = 2048
"""Connections that the system holds for a server until it accepts them."""
ACCEPT_AT_ONCE = 32
"""Connections that asyncio accepts before it serves the others. Each is an open file before it can
be refused."""
