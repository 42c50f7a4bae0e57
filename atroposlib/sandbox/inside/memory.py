"""Memory of a program's processes, added up from `/proc`.

The filter refuses memory that belongs to no process, see `filters`. docs/sandbox.md lists the rest,
with its bounds.
"""

import contextlib
import os
import resource
import socket

COUNTED = (b"VmRSS", b"VmSwap", b"VmPTE")
"""Lines of a `status` file. Page tables count: one byte in each GiB of addresses costs 8 KiB of
them, and next to no resident memory. Swapped pages count, since a program can have its own pages
swapped out."""
RECORD_BYTES = 256
"""The kernel's record of one mapping. A process can have as many mappings as it has pages of
addresses; no file that is cheap to read counts them."""
LONGEST_LOCKS = 1 << 20
"""Bytes of the list of file locks that are read: about 18,000 locks, those of the host included."""
TRIES = 20
"""Attempts to read the memory of a process whose threads come and go."""


class Memory:
    """The memory of all processes below this one.

    Args:
        proc: a descriptor of a folder `/proc`, which this object keeps open.
        own: the folder shows the processes of this process's own namespace and no others.
        own_network: all sockets of the network namespace are the program's.
    """

    def __init__(self, proc: int, own: bool, own_network: bool) -> None:
        self._proc, self._own = proc, own
        self._socket_bytes = most_of_a_socket() if own_network else 0

    def used(self) -> int:
        """Return the bytes in use now. Pages that several processes share count once for each of
        them.

        The records of mappings are left out for the largest process: a program of one process near
        its limit gets a `MemoryError`, and is not ended.
        """
        processes = [self._of_process(name) for name in self._names()]
        records = [most for _, most in processes]
        return (
            sum(size for size, _ in processes)
            + sum(records)
            - max(records, default=0)
            + self._sockets()
        )

    def locks(self) -> int:
        """Return the number of file locks.

        The kernel keeps a record of each, and no limit of a process counts them.
        """
        names = {name.encode() for name in self._names()}
        # For example: 1: POSIX  ADVISORY  WRITE 708 08:02:4711 0 EOF. A lock that waits has `->`
        # after its number.
        fields = [
            line.replace(b"-> ", b"").split()
            for line in self._read("locks", LONGEST_LOCKS).splitlines()
        ]
        return sum(len(line) > 4 and line[4] in names for line in fields)

    def _names(self) -> list[str]:
        return self._namespace() if self._own else self._descendants()

    def _sockets(self) -> int:
        """A socket counts as if it were full: the kernel does not tell how full it is once the
        sending end is closed.
        """
        if not self._socket_bytes:
            return 0
        first = self._read("self/net/sockstat").split(b"\n", 1)[0]  # sockets: used 2
        return int(first.split()[2]) * self._socket_bytes if first else 0

    def _namespace(self) -> list[str]:
        """Process 1 is this one."""
        return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]

    def _descendants(self) -> list[str]:
        """Processes whose parents ended are children of this one, which adopts them."""
        names = [os.readlink("self", dir_fd=self._proc)]
        for name in names:
            for task in self._tasks(name):
                names += self._read(f"{name}/task/{task}/children").decode().split()
        return names[1:]

    def _of_process(self, name: str) -> tuple[int, int]:
        counted = bytes_of(self._read(f"{name}/status"))
        if counted is not None:
            return counted
        # The first thread of a process can end before the others. It has no memory then, and the
        # others still do.
        for _ in range(TRIES):
            tasks = self._tasks(name)
            if len(tasks) < 2:
                break
            for task in tasks:
                counted = bytes_of(self._read(f"{name}/task/{task}/status"))
                if counted is not None:
                    return counted
        return 0, 0

    def _tasks(self, name: str) -> list[str]:
        with contextlib.suppress(OSError):  # the process ended in between
            folder = os.open(
                f"{name}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc
            )
            try:
                return os.listdir(folder)
            finally:
                os.close(folder)
        return []

    def _read(self, path: str, most: int = 1 << 16) -> bytes:
        """Return the beginning of a file, empty if there is none."""
        data = b""
        with contextlib.suppress(OSError):  # the process ended in between
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                # The kernel gives a page at a time.
                while len(data) < most and (more := os.read(descriptor, most)):
                    data += more
            finally:
                os.close(descriptor)
        return data


def most_of_a_socket() -> int:
    """Return the bytes that one socket can hold: a last message may be as large as the buffer that
    it overfills.
    """
    one, other = socket.socketpair()
    with one, other:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def bytes_of(status: bytes) -> tuple[int, int] | None:
    """Read a `status` file.

    Returns:
        The bytes that it counts, and the most that the records of its mappings can have. None for a
        thread that ended, which has no memory any more.
    """
    sizes = {
        line.partition(b":")[0]: line.split()[1]
        for line in status.splitlines()
        if line.startswith(b"Vm")
    }
    if not sizes:
        return None
    counted = sum(int(sizes.get(name, 0)) for name in COUNTED) * 1024
    return counted, int(sizes.get(b"VmSize", 0)) * 1024 // resource.getpagesize() * RECORD_BYTES
