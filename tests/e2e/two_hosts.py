"""Machines that are none: each a network, mount and name namespace of its own, joined by a switch
whose cables can be cut.

Each host has its own address in its own subnet, its own loopback, hostname, /dev/shm and private
folder. Its only route is through the switch, which is a third network namespace. Its traffic can be
dropped (`cut`), slowed (`slowed`), and kept from a port (`firewall`). A host's name means its
loopback there, as a Debian installation has it, and the others' names their addresses.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from example_trainer.child_processes.guard import descendants

T = TypeVar("T")

NOWHERE = "10.79.99.1"
"""An address that every host has a route to, and no host has: packets there are dropped without an
answer.
"""

_CLONE_NEWNET = 0x40000000
_SECONDS = 120.0
_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "sysctl")
_NAMESPACES = ("--net", "--mount", "--uts")
_FORKED = "--kill-child"
"""Has unshare start the script as a child, as a new namespace of processes needs it."""
_CUT, _FIREWALL = 10, 20
"""Priorities of the switch's rules: the smaller come first."""


class NoNamespaces(RuntimeError):
    """Hosts cannot be made here; the message is the exact reason."""


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        name: its hostname.
        address: by which the others reach it.
        folder: a path that is there on every host, with contents of each one's own.
        pid: of the process that keeps its namespaces.
        namespaces: which it has of its own.
    """

    name: str
    address: str
    folder: Path
    pid: int
    namespaces: Sequence[str]

    def command(self, *command: str | Path, directory: Path = Path("/")) -> list[str]:
        """The command that runs a command on this host, in a directory there."""
        enter = [
            "nsenter",
            f"--target={self.pid}",
            *self.namespaces,
            "--",
            "env",
            f"--chdir={directory}",
        ]
        return [*enter, *(str(part) for part in command)]

    def run(self, *command: str | Path) -> str:
        """Run a command there to its end; returns what it wrote.

        Raises NoNamespaces with its last line if it fails.
        """
        return _run(*self.command(*command))

    def calling(self, work: Callable[[], T]) -> T:
        """Return the result of `work` in a thread whose sockets are this host's.

        Its files are this process's.
        """
        outcome: list[T] = []
        failed: list[BaseException] = []

        def inside() -> None:
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                with open(f"/proc/{self.pid}/ns/net") as namespace:
                    if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(
                            ctypes.get_errno(), f"cannot enter the network of {self.name}"
                        )
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                failed.append(error)

        thread = threading.Thread(target=inside, name=f"on {self.name}", daemon=True)
        thread.start()
        thread.join(300)
        if failed:
            raise failed[0]
        if not outcome:
            raise TimeoutError(f"a call on {self.name} took more than 300 s")
        return outcome[0]


class Network:
    """A few hosts and the switch between them. Made by `hosts`."""

    def __init__(self, switch: int, hosts: Sequence[Host]) -> None:
        self._switch = switch
        self.hosts: Mapping[str, Host] = {host.name: host for host in hosts}

    def cut(self, host: Host) -> None:
        """Nothing passes to or from a host any more, without a notice: a pulled cable on the far
        side of a switch.
        """
        for way in ("from", "to"):
            self._on_switch(
                "ip", "rule", "add", way, host.address, "priority", str(_CUT), "blackhole"
            )

    def heal(self, host: Host) -> None:
        """Put the cable back."""
        for way in ("from", "to"):
            self._on_switch(
                "ip", "rule", "del", way, host.address, "priority", str(_CUT), "blackhole"
            )

    @contextmanager
    def slowed(self, host: Host, megabits: float) -> Iterator[None]:
        """Let at most so many million bits pass each second, each way, within the block."""
        port, rate = self._port(host), f"{round(megabits * 1000)}kbit"
        shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        self._on_switch("tc", "qdisc", "replace", "dev", port, *shape)
        host.run("tc", "qdisc", "replace", "dev", "eth0", *shape)
        try:
            yield
        finally:
            self._on_switch("tc", "qdisc", "del", "dev", port, "root")
            host.run("tc", "qdisc", "del", "dev", "eth0", "root")

    @contextmanager
    def firewall(self, host: Host, port: int) -> Iterator[None]:
        """Drop what is sent to a TCP port of a host within the block, without an answer."""
        rule = (
            "to",
            host.address,
            "ipproto",
            "tcp",
            "dport",
            str(port),
            "priority",
            str(_FIREWALL),
            "blackhole",
        )
        self._on_switch("ip", "rule", "add", *rule)
        try:
            yield
        finally:
            self._on_switch("ip", "rule", "del", *rule)

    def bytes_to(self, host: Host) -> int:
        """Return the bytes that have left the switch towards a host so far."""
        statistics = json.loads(
            self._on_switch("ip", "-json", "-statistics", "link", "show", "dev", self._port(host))
        )
        return int(statistics[0]["stats64"]["tx"]["bytes"])

    def _port(self, host: Host) -> str:
        return f"port{list(self.hosts).index(host.name)}"

    def _on_switch(self, *command: str) -> str:
        return _run("nsenter", f"--target={self._switch}", "--net", "--", *command)


@contextmanager
def hosts(folder: Path, *names: str, own_processes: str | None = None) -> Iterator[Network]:
    """Hosts of these names, for the time of the block; processes that were started there are the
    caller's to end before.

    Args:
        folder: for their files; each host has a private `folder/private` of its own.
        own_processes: a host sees its own processes alone, which end with the block, and has a
            folder of its own at this path.

    Raises:
        NoNamespaces: this machine does not let us.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or sys.platform != "linux":
        raise NoNamespaces(
            f"no {', '.join(missing)}" if missing else f"{sys.platform} has no network namespaces"
        )
    private, names_file = folder / "private", folder / "hosts"
    private.mkdir(parents=True, exist_ok=True)
    addresses = {name: f"10.78.{number}.2" for number, name in enumerate(names)}
    with ExitStack() as stack:
        switch = _holder(stack, "--net", "true")
        at_switch = ("nsenter", f"--target={switch}", "--net", "--")
        # No name server is reached: the failure comes at once, and each time, not once a second at
        # most. PyTorch looks up the name of its peer there, and waits.
        _run(*at_switch, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.icmp_ratelimit=0")
        _run(
            *at_switch,
            "ip",
            "rule",
            "add",
            "priority",
            "1",
            "ipproto",
            "udp",
            "dport",
            "53",
            "unreachable",
        )
        made = []
        for number, name in enumerate(names):
            others = "".join(f"{addresses[other]} {other}\n" for other in names if other != name)
            own = names_file.with_suffix(f".{name}")
            own.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
            script = (
                f"hostname {name} && mount -t tmpfs lockstep /dev/shm && mount -t tmpfs lockstep '{private}' && "
                f"mount --bind '{own}' /etc/hosts && ip link set lo up"
            )
            namespaces, options = _NAMESPACES, ()
            if own_processes:
                Path(own_processes).mkdir(exist_ok=True)
                script += f" && mount -t tmpfs lockstep '{own_processes}'"
                namespaces, options = (*_NAMESPACES, "--pid"), (_FORKED, "--mount-proc")
            pid = _holder(stack, *namespaces, *options, script)
            _join(switch, pid, number)
            made.append(Host(name, addresses[name], private, pid, namespaces))
        yield Network(switch, made)


def _join(switch: int, pid: int, number: int) -> None:
    """A cable from a host to the switch, with an address on both ends."""
    inside = ("nsenter", f"--target={pid}", "--net", "--")
    at_switch = ("nsenter", f"--target={switch}", "--net", "--")
    port, subnet = f"port{number}", f"10.78.{number}"
    _run(
        *at_switch,
        "ip",
        "link",
        "add",
        port,
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        str(pid),
    )
    _run(*at_switch, "ip", "address", "add", f"{subnet}.1/24", "dev", port)
    _run(*at_switch, "ip", "link", "set", port, "up")
    _run(*inside, "ip", "address", "add", f"{subnet}.2/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "route", "add", "default", "via", f"{subnet}.1")
    if number == 0:
        _run(*at_switch, "ip", "route", "add", "blackhole", "default")


def _holder(stack: ExitStack, *arguments: str) -> int:
    """A process that keeps new namespaces, after a script there has succeeded, until the stack ends
    it. Returns its id.

    Args:
        arguments: which namespaces, and last the script.
    """
    *namespaces, script = arguments
    # It ends when its standard input does, so that it outlives neither this block nor this process.
    # Its shell stays, which is the parent of orphans where it is the first process of its own.
    command = ["unshare", *namespaces, "--", "sh", "-c", f"{script} && echo ready && cat; exit"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline().strip() != "ready":
        process.kill()
        raise NoNamespaces(
            f"{' '.join(command[:-1])}: {process.stderr.read().strip() or 'ended without a word'}"
        )
    return descendants(process.pid)[0] if _FORKED in namespaces else process.pid


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NoNamespaces(
            f"`{' '.join(command)}` failed: {said[-1] if said else f'status {done.returncode}'}"
        )
    return done.stdout
