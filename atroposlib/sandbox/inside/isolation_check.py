"""A program for a new sandbox: it tries the actions that the sandbox must prevent, and returns the
ones that succeeded.
"""

import ctypes
import os
import socket


def what_is_open(secret: str, port: int, name: str, parent: int, disk: int) -> dict[str, str]:
    """Return the isolations that failed, with the action that succeeded.

    Args:
        secret: a file that each user may read.
        port: of a listener on this machine.
        name: of an abstract socket with a listener.
        parent: process id of the sandbox's maker.
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
    # 0x10000000 makes a new user namespace.
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0:
        openings["syscalls"] = "a program could make namespaces of its own"
    return openings
