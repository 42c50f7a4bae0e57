"""Disks that fill: a small tmpfs where the tests may mount one, and a function of the system that
fails where they may not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MNT_DETACH = 2


@contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    """A file system of its own at `folder/disk`. Skips the test where none can be mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = folder / "disk"
    path.mkdir()
    options = f"size={int(megabytes * 1024)}k,mode=700".encode()
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, options):
        pytest.skip(f"mounting a small file system needs root: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        libc.umount2(bytes(path), MNT_DETACH)


@contextmanager
def limited_files(n_bytes: int = 0) -> Iterator[None]:
    """In the block the kernel refuses to make a file longer than this (EFBIG), in the middle of a
    write if need be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullDisk:
    """A folder whose disk can be full for the length of a block.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path, is_own: bool) -> None:
        self.path, self._is_own = path, is_own

    @contextmanager
    def full(self) -> Iterator[None]:
        """In the block the disk takes nothing."""
        if not self._is_own:
            with limited_files():
                yield
            return
        other = fill(self.path)
        try:
            yield
        finally:
            other.unlink()


KINDS = ("a small file system", "a limit on file sizes")
"""The first needs root, the second nothing."""


@contextmanager
def disk_of_kind(kind: str, folder: Path) -> Iterator[FullDisk]:
    """A disk of one of the `KINDS`."""
    if kind == KINDS[1]:
        yield FullDisk(folder, is_own=False)
        return
    with small_disk(folder, 4) as path:
        yield FullDisk(path, is_own=True)


def fill(folder: Path) -> Path:
    """Another program's file, which takes all of the disk. Returns the file."""
    path = folder / "of_another_program"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            chunk = b"x" * size
            with suppress(FullError):
                while True:
                    _write(file.fileno(), chunk)
    return path


class FullError(Exception):
    """The disk takes no more."""


def _write(descriptor: int, chunk: bytes) -> None:
    try:
        os.write(descriptor, chunk)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise FullError from None
        raise
