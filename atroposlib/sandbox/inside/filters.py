"""Which calls a program may not make: the seccomp filter as data, and the same promise without
namespaces.

A list of what is forbidden, not of what is allowed: a Python that is new, or a library, makes calls
that nobody listed. What holds a program are the namespaces, its limits and that it has no rights;
the filter takes away the parts of the kernel that a program of this kind has no use for, which is
where holes have been found.
"""

import os
import struct
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
    # that is spliced stays in a pipe or a socket after its file was emptied, and one byte of it
    # costs a whole page.
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
    # Signals: to whom they may go is said by the process-id namespace otherwise.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    # What Landlock leaves open of files that can be named.
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
"""Offsets into what a filter is given; of an argument, those of its low 32 bits."""
X32 = 0x40000000
"""Numbers from here are calls of another interface, with the same effects."""


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse(number: int) -> bytes:
    return _step(RETURN, 0x00050000 | number)


def seccomp_filter(machine: str, namespaces: bool) -> bytes:
    """The filter's program.

    Args:
        machine: as `os.uname().machine` says it.
        namespaces: whether the program runs in namespaces of its own.

    Raises:
        OSError: there is no table for such a machine.
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
    """Refuse a call of which an argument passes one of the tests, allow it otherwise."""
    inner = _step(LOAD, argument)
    for test, value in tests:
        inner += _step(test, value, 0, 1) + refuse(EPERM)
    inner += _step(RETURN, ALLOW)
    return _step(JUMP_EQUAL, number, 0, len(inner) // 8) + inner


def _unless(number: int, argument: int, value: int) -> bytes:
    """Refuse a call of which an argument is not this value."""
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
    """What `kernel.landlock` is given so that nothing can be read but these paths, and nothing be
    written.

    Raises:
        OSError: the kernel's Landlock is too old.
    """
    if version < NEEDED_LANDLOCK:
        raise OSError(
            ENOSYS,
            f"Landlock {NEEDED_LANDLOCK} is needed (Linux 6.2), this kernel has {version or 'none'}",
        )
    handled = RIGHTS[max(known for known in RIGHTS if known <= version)]
    rules = []
    for path in readable:
        # A right to list is refused for what is no folder.
        rules.append((path, READ_FILES if os.path.isdir(path) else READ_FILES & ~0b1000))
    return handled, SCOPES if version >= SCOPES_SINCE else 0, rules
