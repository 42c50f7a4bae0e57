"""The kernel's interfaces that Python has no name for: namespaces, mounts, capabilities, and what a
process is forbidden.

All of the folder `inside` runs in a process of its own that is started with the standard library
alone.
"""

import ctypes
import errno
import os
import signal
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x80
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
ATTR_RDONLY, ATTR_NOSUID = 0x1, 0x2

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    4,
    22,
    24,
    36,
    38,
)
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

SYSCALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}
"""By machine, those that glibc may have no function for. Landlock's have the same number
everywhere."""
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.syscall.restype = ctypes.c_long
_libc_locked = ctypes.PyDLL(None, use_errno=True)
_libc_locked.syscall.restype = ctypes.c_long


class KernelRefused(OSError):
    """A call that the kernel refused; the message names the call."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(number, f"{what}: {os.strerror(number)}")

    def __str__(self) -> str:
        return str(self.strerror)


def _checked(what: str, result: int) -> int:
    if result == -1:
        raise KernelRefused(what, ctypes.get_errno())
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by the flags for new ones."""
    _checked("unshare", _libc.unshare(flags))


def fork_into(flags: int) -> int:
    """Fork a process that is the first of new namespaces; `unshare` would need one more in between.

    Only for a process of one thread, whose child forks again before it runs any code of others:
    Python and the C library do not learn that this is a new process.
    """
    number = ctypes.c_long(SYSCALLS[os.uname().machine]["clone"])
    nothing = (ctypes.c_long(0),) * 4
    # By PyDLL, which keeps Python's lock: nobody else could give it back in the child.
    return _checked(
        "clone", int(_libc_locked.syscall(number, ctypes.c_long(flags | signal.SIGCHLD), *nothing))
    )


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _checked(
        f"mount {kind or 'bind'} on {target}",
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            flags,
            options.encode() or None,
        ),
    )


def detach(target: str) -> None:
    """Unmount a tree, even where something in it is still in use."""
    _checked(f"umount {target}", _libc.umount2(target.encode(), MNT_DETACH))


def pivot_root(new_root: str, put_old: str) -> None:
    _checked("pivot_root", _syscall("pivot_root", new_root.encode(), put_old.encode()))


def make_read_only(path: str, tree: bool) -> None:
    """A mount, or all below it too: nothing can be changed, and no set-uid bit counts.

    Needs Linux 5.12.
    """
    attributes = struct.pack("QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    at_fdcwd = ctypes.c_int(-100)
    flags = ctypes.c_uint(AT_RECURSIVE if tree else 0)
    result = _syscall(
        "mount_setattr",
        at_fdcwd,
        path.encode(),
        flags,
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    _checked(f"mount_setattr {path}", result)


def prctl(option: int, value: int = 0, more: int = 0) -> None:
    _checked(f"prctl {option}", _libc.prctl(option, value, more, 0, 0))


def bound_capabilities() -> None:
    """Whatever this process executes from here on, it gains no capability."""
    number = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, number)
        except KernelRefused as refusal:
            # Beyond the last capability; or an ordinary user, who has none to hand on.
            if refusal.errno not in (errno.EINVAL, errno.EPERM):
                raise
            return
        number += 1


def drop_capabilities() -> None:
    """All that this process has."""
    _checked("capset", _syscall("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)))


def forbid_new_privileges() -> None:
    """Set-uid programs give nothing from here on."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Have the kernel ask a seccomp filter, 8 bytes an instruction, at every call of this process
    and its children.
    """
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("H6xQ", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(buffer))


def _syscall(name: str, *arguments: object) -> int:
    machine = os.uname().machine
    if machine not in SYSCALLS:
        raise KernelRefused(f"{name} on {machine}", errno.ENOSYS)
    return int(_libc.syscall(ctypes.c_long(SYSCALLS[machine][name]), *arguments))


def landlock_version() -> int:
    """Of the interface; 0 where the kernel has none."""
    return max(
        0,
        int(
            _libc.syscall(
                ctypes.c_long(LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1)
            )
        ),
    )


def landlock(handled: int, scoped: int, allowed: list[tuple[str, int]]) -> None:
    """Forbid this process and its children what is `handled` of the file system, but for what is
    allowed of each path.

    Args:
        handled: access rights that are forbidden where no rule allows them.
        scoped: what may not leave the process's domain; 0 where the kernel knows no scopes.
        allowed: path and access rights, of the path and all below it.
    """
    attributes = struct.pack("QQQ", handled, 0, scoped)
    size = 24 if scoped else 8
    create = ctypes.c_long(LANDLOCK_CREATE_RULESET)
    rules = _checked(
        "landlock_create_ruleset",
        int(_libc.syscall(create, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))),
    )
    try:
        for path, rights in allowed:
            where = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", rights, where)
                add = ctypes.c_long(LANDLOCK_ADD_RULE)
                added = _libc.syscall(
                    add, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0)
                )
                _checked(f"landlock_add_rule {path}", int(added))
            finally:
                os.close(where)
        restrict = ctypes.c_long(LANDLOCK_RESTRICT_SELF)
        _checked(
            "landlock_restrict_self",
            int(_libc.syscall(restrict, ctypes.c_int(rules), ctypes.c_uint(0))),
        )
    finally:
        os.close(rules)
