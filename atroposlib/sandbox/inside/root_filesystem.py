"""The sandbox's own root: Python's files, read-only, and nothing else of the host."""

import os
import sys
import sysconfig

from . import kernel

NOBODY = 65534
FIRST_USER, USERS = 0x70000000, 50_000
"""User ids of programs, one after the other, where root makes the sandbox: far above those that
anything hands out."""
DEVICES = ("null", "full", "random", "urandom")
"""Not `zero`: a shared mapping of it is shared memory that no process is charged for."""
OLD = "/old"


def python_files() -> list[str]:
    """Files, folders and links that Python needs, none of them within another."""
    paths = [os.path.realpath(sys.executable)]
    if sys.base_prefix in ("/", "/usr"):
        paths += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    else:
        paths += [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    return outermost([path for path in dict.fromkeys(paths) if os.path.lexists(path)])


def outermost(paths: list[str]) -> list[str]:
    """Without those that lie within another; a link holds nothing."""
    folders = [path for path in paths if not os.path.islink(path)]
    return [
        path
        for path in paths
        if not any(path != other and path.startswith(other.rstrip("/") + "/") for other in folders)
    ]


def mapped_users() -> tuple[int, int]:
    """First id and number of ids that programs may have, of those that exist here.

    Raises:
        OSError: as good as none but root's exists, as in some containers.
    """
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    start, _, count = max(ranges)
    if start + count >= FIRST_USER + USERS:
        return FIRST_USER, USERS
    if count < 2048:
        raise OSError(1, f"only {count} user ids exist here")
    return start + count - 1024, 1024


def map_one_user(outside_user: int, outside_group: int, inside: int = 0) -> None:
    """After `unshare(CLONE_NEWUSER)`: one user, one group, and no way to change groups."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside_user} 1"),
        ("gid_map", f"{inside} {outside_group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def build_root(readable: list[str]) -> None:
    """Make a root of these paths in the mount namespace that was just entered, read-only, and
    forget the old one.

    `/proc` is the host's until a program's own processes hide it: the kernel allows a new one only
    where one can be seen.

    Raises:
        OSError: the kernel refused something; the message says what.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount(
        "sandbox",
        "/tmp",
        "tmpfs",
        kernel.MS_NOSUID | kernel.MS_NODEV,
        "size=1m,nr_inodes=1000,mode=755",
    )
    os.mkdir(f"/tmp{OLD}")
    os.chdir("/tmp")
    kernel.pivot_root(".", f".{OLD}")
    os.chdir("/")
    for path in readable:
        _show(path)
    for device in DEVICES:
        _show(f"/dev/{device}")
    for folder in ("/proc", "/tmp"):
        os.mkdir(folder)
    # The only one that can be written: a user namespace is told there whom it holds.
    kernel.mount(f"{OLD}/proc", "/proc", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.detach(OLD)
    os.rmdir(OLD)
    kernel.make_read_only("/", tree=False)


def _show(path: str) -> None:
    """Bind a path of the old root to the same place in the new one."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    old = f"{OLD}{path}"
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(old, path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path, tree=True)
