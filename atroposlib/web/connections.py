"""How many connections a client keeps to the servers of its run, and for how long; and how servers accept them. Pure.

httpx keeps 20 idle ones unless told otherwise, for five seconds. Beyond that its pool (httpcore 1.0, issue 1110 there) closes
connections that look idle, and one that it has just given to a request looks idle until the request is written: now and then it
closes a socket under a request that is on its way. The request then fails with "Bad file descriptor", or waits in vain until
its deadline. A pool that never closes what the server holds open cannot do that.
"""

from __future__ import annotations

import httpx

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
"""As many as there are requests at a time, for as long as the server lets them be."""

SERVER_KEEPS_SECONDS = 75
"""How long the stack's own servers hold an idle connection open. Longer than a training step takes as a rule: a request that
meets the end of this time finds the connection closed under it."""

LISTEN_BACKLOG = 2048
"""Connections that the system holds for a server until it accepts them."""
ACCEPT_AT_ONCE = 32
"""Connections that asyncio accepts before it looks at those that it has. Each is an open file before it can be refused."""
