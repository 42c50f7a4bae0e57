"""Run as a program in a new sandbox: tries what the sandbox is to withhold, and says what it could
do.
"""

import ctypes
import os
import socket


def what_is_open(secret: str, port: int, name: str, parent: int, disk: int) -> dict[str, str]:
    """Isolation -> what was possible.

    Args:
        secret: a file that everybody may read.
        port: where somebody listens on this machine.
        name: of an abstract socket on which somebody listens.
        parent: process id of whoever made the sandbox.
        disk: bytes that may be written.
    """
    openings = {}
    for path in (secret, "/etc/passwd", "/proc/self/environ", "/proc/1/environ"):
        try:
            with open(path, "rb"):
                openings["files"] = f"a program could open {path}"
        except OSError:
            continue
    for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name)):
        try:
            with socket.socket(family) as client:
                client.settimeout(1)
                client.connect(address)
                openings["network"] = f"a program could connect to {address!r}"
        except OSError:
            continue
    if os.getpid() != 2:  # in a process-id namespace the program is the second
        try:
            os.kill(parent, 0)
            openings["processes"] = f"a program could signal process {parent}"
        except OSError:
            pass
    written = 0
    block = bytes(1 << 20)
    for place, folder in enumerate(("/tmp", "/dev/shm", "/var/tmp", ".")):
        try:
            for number in range(2 * disk // len(block) + 2):
                with open(f"{folder}/{place}-{number}", "wb") as file:
                    written += file.write(block)
        except OSError:
            continue
    if written > disk:
        openings["disk"] = f"a program could write {written} bytes of {disk}"
    # A new user namespace, of which nothing is known in here otherwise.
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0:
        openings["syscalls"] = "a program could make namespaces of its own"
    return openings
