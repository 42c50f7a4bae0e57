"""The limit on open files of this process, and the number of connections that a server may hold
under it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from atroposlib.web.connections import ACCEPT_AT_ONCE

MAX_FILES = 65_536
"""The soft limit is raised up to the hard one, but not above this: some programs loop over all
numbers below it."""
MAX_CONNECTIONS = 8192
"""Connections of one server, however many files may be open. Each takes memory before it has sent a
request."""
KEPT_SHARE, MIN_KEPT = 0.25, 4 * ACCEPT_AT_ONCE + 64
"""Files that connections may not take, as a share of the limit and as a number. Stores, child
processes, requests to other servers, and connections that are accepted but not yet counted need
them."""


def raise_file_limit(report: Callable[[str], object]) -> int:
    """Raise the soft limit on open files to the hard one, and return the limit that now holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_FILES if hard == unlimited else min(hard, MAX_FILES)
    if soft != unlimited and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            report(
                f"the limit on open files stays at {soft}: raising it to {wanted} failed ({error})"
            )
            return soft
        soft = wanted
    return MAX_FILES if soft == unlimited else soft


def connections_under(files: int) -> int:
    """Return the number of connections that a server may hold with this limit on open files."""
    return max(16, min(MAX_CONNECTIONS, files - max(int(files * KEPT_SHARE), MIN_KEPT)))


def connections_allowed(report: Callable[[str], object]) -> int:
    """Raise the limit on open files, and return the number of connections that a server may hold.

    Args:
        report: writes a line into the server's log.
    """
    files = raise_file_limit(report)
    most = connections_under(files)
    report(f"limit on open files (ulimit -n): {files}; connections held at a time: at most {most}")
    return most
