"""The isolation of a program: kernel interfaces without a name in Python, the filter of system
calls, and the root of the sandbox.

The filter lists forbidden calls. A list of allowed calls would break with each new Python or
library. Namespaces, limits and the lack of rights contain a program. The filter removes parts of
the kernel that such a program does not need and in which holes were found. Without namespaces, the
filter forbids more calls, and Landlock protects the files.

The root contains Python's files, read-only, and nothing else of the host.

The code in the folder `inside` runs in a process of its own, which is started with the standard
library only.
"""

import ctypes
import errno
import os
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38

Numbers = dict[str, tuple[int | None, int | None]]

FORBIDDEN: Numbers = {
    # Other processes, and looking into them.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "inotify_init1": (294, 26), "inotify_init": (253, None),
    # Large parts of the kernel that a function has no use for.
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "seccomp": (317, 277), "modify_ldt": (154, None), "personality": (135, 92),
    "lookup_dcookie": (212, 18), "syslog": (103, 116),
    # The machine itself.
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    # Memory that belongs to no process, so that adding up the processes does not show it. A page
    # that is spliced stays in a pipe or a socket after its file was emptied. One byte of it costs a
    # whole page.
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "sendfile": (40, 71), "setsockopt": (54, 208),
    "remap_file_pages": (216, 234), "io_setup": (206, 0), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # Network, and more of that memory. Pairs of connected sockets remain: event loops use them.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}  # fmt: skip
"""Name -> number on x86_64 and on aarch64."""

WITHOUT_NAMESPACES: Numbers = {
    # Signals. With namespaces, the process-id namespace limits their targets.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    # Calls on files by name that Landlock leaves open.
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466),
}  # fmt: skip
"""Forbidden as well where the namespaces are missing."""

BY_ARGUMENT: Numbers = {
    "clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261), "fcntl": (72, 25), "ioctl": (16, 29),
    "mmap": (9, 222), "socketpair": (53, 199),
}  # fmt: skip
"""Allowed with some arguments."""

NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces."""
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
FORBIDDEN_FCNTL = (8, 10, 15, 37, 38, 1031)
"""fcntl's F_SETOWN, F_SETSIG and F_SETOWN_EX, which choose the process that the kernel signals;
F_OFD_SETLK and F_OFD_SETLKW, whose locks show no process; and F_SETPIPE_SZ."""
TERMINAL_TRICKS = (0x5412, 0x541C, 0x8901, 0x8902)
"""ioctl's TIOCSTI, TIOCLINUX, FIOSETOWN and SIOCSPGRP."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
"""mmap's flags. A process that inherits a shared anonymous mapping keeps pages that the kernel
charges to other processes, and huge pages are in no process's size."""
AF_UNIX = 1

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
NUMBER_AT, ARCH_AT, FIRST_AT, SECOND_AT, FOURTH_AT = 0, 4, 16, 24, 40
"""Offsets into the data of a filter. An argument's offset is that of its low 32 bits."""
X32 = 0x40000000
"""Numbers from here are calls of another interface, with the same effects."""


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse(number: int) -> bytes:
    return _step(RETURN, 0x00050000 | number)


def seccomp_filter(machine: str, namespaces: bool) -> bytes:
    """The filter's program.

    Args:
        machine: the value of `os.uname().machine`.
        namespaces: whether the program runs in namespaces of its own.

    Raises:
        OSError: this machine has no table.
    """
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"no table of calls for {machine}")
    column = list(AUDIT_ARCH).index(machine)
    names = FORBIDDEN | ({} if namespaces else WITHOUT_NAMESPACES)
    program = (
        _step(LOAD, ARCH_AT) + _step(JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0) + _step(RETURN, KILL)
    )
    program += _step(LOAD, NUMBER_AT) + _step(JUMP_AT_LEAST, X32, 0, 1) + refuse(EPERM)
    for number in sorted(row[column] for row in names.values() if row[column] is not None):  # type: ignore[type-var]
        program += _step(JUMP_EQUAL, number or 0, 0, 1) + refuse(EPERM)
    by_argument = {name: row[column] or 0 for name, row in BY_ARGUMENT.items()}
    # glibc asks for clone where clone3 is not there; of clone3 a filter cannot see the flags.
    program += _step(JUMP_EQUAL, by_argument["clone3"], 0, 1) + refuse(ENOSYS)
    program += _clone(by_argument["clone"])
    # Another process than itself.
    program += _unless(by_argument["prlimit64"], FIRST_AT, 0)
    program += _unless(by_argument["socketpair"], FIRST_AT, AF_UNIX)
    program += _no_hidden_mapping(by_argument["mmap"])
    program += _when(
        by_argument["fcntl"], SECOND_AT, [(JUMP_EQUAL, value) for value in FORBIDDEN_FCNTL]
    )
    program += _when(
        by_argument["ioctl"], SECOND_AT, [(JUMP_EQUAL, value) for value in TERMINAL_TRICKS]
    )
    return program + _step(RETURN, ALLOW)


def _when(number: int, argument: int, tests: Iterable[tuple[int, int]]) -> bytes:
    """Refuse a call if an argument passes one of the tests; else allow it."""
    inner = _step(LOAD, argument)
    for test, value in tests:
        inner += _step(test, value, 0, 1) + refuse(EPERM)
    inner += _step(RETURN, ALLOW)
    return _step(JUMP_EQUAL, number, 0, len(inner) // 8) + inner


def _unless(number: int, argument: int, value: int) -> bytes:
    """Refuse a call if an argument is not this value."""
    inner = (
        _step(LOAD, argument)
        + _step(JUMP_EQUAL, value, 0, 1)
        + _step(RETURN, ALLOW)
        + refuse(EPERM)
    )
    return _step(JUMP_EQUAL, number, 0, len(inner) // 8) + inner


def _clone(number: int) -> bytes:
    """Refuse new namespaces, and processes that share descriptors: locks of a process that ended
    would outlive it unseen.
    """
    inner = _step(LOAD, FIRST_AT) + _step(JUMP_SET, NEW_NAMESPACES, 0, 1) + refuse(EPERM)
    inner += (
        _step(JUMP_SET, CLONE_FILES, 0, 2) + _step(JUMP_SET, CLONE_THREAD, 1, 0) + refuse(EPERM)
    )
    inner += _step(RETURN, ALLOW)
    return _step(JUMP_EQUAL, number, 0, len(inner) // 8) + inner


def _no_hidden_mapping(number: int) -> bytes:
    """Refuse mappings whose pages the kernel counts for no process: anonymous shared ones, and huge
    pages of the host's pool.

    A process that inherits a shared mapping keeps its pages without being charged for them. Shared
    mappings of files remain: the only files that a program can write are bounded by the size of its
    temporary folder.
    """
    inner = _step(LOAD, FOURTH_AT) + _step(JUMP_SET, MAP_HUGETLB, 0, 1) + refuse(EPERM)
    inner += (
        _step(JUMP_SET, MAP_ANONYMOUS, 0, 2) + _step(JUMP_SET, MAP_SHARED, 0, 1) + refuse(EPERM)
    )
    inner += _step(RETURN, ALLOW)
    return _step(JUMP_EQUAL, number, 0, len(inner) // 8) + inner


READ_FILES = 0b1101
"""Landlock's rights to execute, to read a file and to list a folder."""
RIGHTS = {3: 0x7FFF, 5: 0xFFFF}
"""From that version of Landlock on: all rights that it can take away. Below 3 a file can be emptied
that cannot be opened."""
NEEDED_LANDLOCK = min(RIGHTS)
SCOPES_SINCE, SCOPES = 6, 0b11
"""Abstract sockets of others, and signals to them."""


def landlock_rules(version: int, readable: Iterable[str]) -> tuple[int, int, list[tuple[str, int]]]:
    """Arguments of `landlock` under which only these paths can be read, and nothing be written.

    Raises:
        OSError: the kernel's Landlock is too old.
    """
    if version < NEEDED_LANDLOCK:
        raise OSError(
            ENOSYS,
            f"Landlock {NEEDED_LANDLOCK} is needed (Linux 6.2), this kernel has {version or 'none'}",
        )
    handled = RIGHTS[max(since for since in RIGHTS if since <= version)]
    rules = []
    for path in readable:
        # Landlock refuses a right to list for a path that is not a folder.
        rules.append((path, READ_FILES if os.path.isdir(path) else READ_FILES & ~0b1000))
    return handled, SCOPES if version >= SCOPES_SINCE else 0, rules


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
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
"""Numbers of calls for which glibc may lack a function, by machine. Landlock's calls have the same
number everywhere."""
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

    Only for a process of one thread, whose child forks again before it runs any code of others.
    Python and the C library do not learn that this is a new process.
    """
    number = ctypes.c_long(SYSCALLS[os.uname().machine]["clone"])
    nothing = (ctypes.c_long(0),) * 4
    # PyDLL keeps Python's lock: no other thread could release it in the child.
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
    """Keep this process from gaining a capability, whatever it executes."""
    number = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, number)
        except KernelRefused as refusal:
            # The number is beyond the last capability, or this user has no capabilities.
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
    """Return the version of the interface; 0 where the kernel has none."""
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


NOBODY = 65534
FIRST_USER, USERS = 0x70000000, 0x0F000000
"""User ids of programs, used in turn, if root makes the sandbox. They are far above the ids that
systems assign. A sandbox begins at a random one. The kernel counts processes by user id on the
whole host, and programs of two sandboxes must not share a limit."""
DEVICES = ("null", "full", "random", "urandom")
"""Devices that programs see. `zero` is missing: a shared mapping of it is memory of no process."""
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
    """Return the paths that do not lie within another of them. A link contains nothing."""
    folders = [path for path in paths if not os.path.islink(path)]
    return [
        path
        for path in paths
        if not any(path != other and path.startswith(other.rstrip("/") + "/") for other in folders)
    ]


def mapped_users() -> tuple[int, int]:
    """Return the first user id for programs, and the number of ids.

    Raises:
        OSError: this namespace has hardly an id besides root's, as in some containers.
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
        OSError: the kernel refused a step; the message names it.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount(
        "sandbox",
        "/tmp",
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        "size=1m,nr_inodes=1000,mode=755",
    )
    os.mkdir(f"/tmp{OLD}")
    os.chdir("/tmp")
    pivot_root(".", f".{OLD}")
    os.chdir("/")
    for path in readable:
        _show(path)
    for device in DEVICES:
        _show(f"/dev/{device}")
    for folder in ("/proc", "/tmp"):
        os.mkdir(folder)
    # The only writable mount: the ids of a user namespace are set there.
    mount(f"{OLD}/proc", "/proc", None, MS_BIND | MS_REC)
    detach(OLD)
    os.rmdir(OLD)
    make_read_only("/", tree=False)


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
    mount(old, path, None, MS_BIND | MS_REC)
    make_read_only(path, tree=True)
