"""vllm_bridge_config.json: what a server publishes for trainers on its machine, and what it leaves
behind when it is killed.

Each server has a file of its own. The first one in a folder takes the documented name; a server
that finds that taken puts its port into the name. A server keeps its file locked (flock) for as
long as it lives. The kernel lets go when the process ends, however it ends. So a file's server is
known to live or not even where process ids have no meaning, as in another container.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_patching.protocol.manifest import Manifest

logger = logging.getLogger("vllm.lockstep.bridge")

CONFIG_NAME = "vllm_bridge_config.json"
_CLAIM_SECONDS = 5.0
_POLL_SECONDS = 0.02


class ConfigFileError(RuntimeError):
    """The file cannot be written. The message gives the place, the reason and the remedy."""


@dataclass(frozen=True)
class _Found:
    """The file under one of the names that a server may take.

    Attributes:
        held: its server lives.
        facts: its content; empty if it is torn.
    """

    held: bool
    facts: Mapping[str, Any]

    def is_left_by(self, port: int) -> bool:
        """Return whether the server of this port left it, or one of a version that did not write
        its port.
        """
        return not self.held and self.facts.get("port", port) == port

    @property
    def trainer(self) -> str:
        """The trainer that the file's server was serving or waiting for, if that may still live;
        else empty.
        """
        trainer = self.facts.get("awaited_trainer", "")
        if self.facts.get("epoch", 0) != 0:
            trainer = self.facts.get("trainer", "")
        return (
            trainer
            if isinstance(trainer, str) and trainer and runs_here(trainer) is not False
            else ""
        )


class ConfigFile:
    """The file of one server: claimed before the server answers, rewritten when a trainer joins,
    removed when the server stops.

    Attributes:
        path: where it is; the documented name unless that belongs to another server.
        awaited: why this server must not serve its checkpoint's weights yet; empty if it may.
    """

    def __init__(self, folder: Path, port: int) -> None:
        """
        Args:
            folder: where it goes.
            port: where the server listens; by it a server that was killed and started again knows
                its own file.
        """
        self._folder, self._port = folder.absolute(), port
        self.path = self._folder / CONFIG_NAME
        self.awaited = ""
        self._awaited_trainer = ""
        self._descriptor: int | None = None

    def claim(self) -> None:
        """Take a name that no living server has, and learn what a killed server of this port left
        under it.

        A server that was killed in the middle of a run leaves its file. The trainer named there may
        still live (or cannot be looked up, being on another machine). Then it holds newer weights,
        and will send them as soon as it finds this server. Files of servers at other ports delay no
        other server, and are overwritten only if no trainer that may live waits for its server.

        Raises:
            ConfigFileError: the folder cannot be written.
        """
        with self._named():
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder):
                self._choose()
                self._replace({"awaited_trainer": self._awaited_trainer})

    def publish(
        self,
        facts: Mapping[str, Any],
        manifests: Sequence[Manifest],
        handles: Sequence[Mapping[str, Any] | None],
    ) -> None:
        """Write the file atomically, readable by this user alone: it holds the handles to the
        weights' memory.

        Args:
            facts: the server's instance, model, versions, epoch and trainer.
            manifests, handles: per rank, the layout and the storage handles (None where storage is
                not shared).

        Raises:
            ConfigFileError: it cannot be written.
        """
        data = {
            **facts,
            "awaited_trainer": "" if facts["epoch"] else self._awaited_trainer,
            "rendezvous": {
                "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
                "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
            },
            "param_mappings": manifests[0].to_json()["param_mappings"],
            "ranks": [
                {**m.to_json(), "handles": h} for m, h in zip(manifests, handles, strict=True)
            ],
        }
        with self._named(), _locked(self._folder):
            if not self._is_mine():
                # It was deleted from outside; another server may have taken its name since.
                self._choose()
            self._replace(data)

    def remove(self) -> None:
        """Take back what was published, and nothing of another server's."""
        if self._descriptor is None:
            return
        try:
            with self._named(), _locked(self._folder):
                if self._is_mine():
                    self.path.unlink()
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def _choose(self) -> None:
        documented = self._folder / CONFIG_NAME
        with_port = documented.with_stem(f"{documented.stem}-{self._port}")
        found = {path: _look(path) for path in (documented, with_port)}
        mine = [
            path for path, left in found.items() if left is not None and left.is_left_by(self._port)
        ]
        first, second = found[documented], found[with_port]
        if first is None or documented in mine or not (first.held or first.trainer):
            self.path = documented
        elif second is None or not second.held:
            self.path = with_port
        else:  # the same port at another address of this machine
            self.path = with_port.with_stem(f"{with_port.stem}-{os.getpid()}")
        trainers = [
            left.trainer for path in mine if (left := found[path]) is not None and left.trainer
        ]
        self._awaited_trainer = trainers[0] if trainers else ""
        self.awaited = ""
        if trainers:
            self.awaited = (
                f"the server before this one was serving {self._awaited_trainer}, which may still be training: waiting for its "
                f"weights. If it is not coming back, delete {self.path} and start this server again to serve the checkpoint's"
            )
        if self.path != documented:
            logger.info("[Bridge] %s is another server's; this one's is %s", documented, self.path)
        for path in mine:
            if path != self.path:
                path.unlink()

    def _is_mine(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            there, mine = self.path.lstat(), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def _replace(self, data: Mapping[str, Any]) -> None:
        """Put a new file, already locked, in the place of what is under the name."""
        where = {
            "port": self._port,
            "pid": os.getpid(),
            "hostname": os.uname().nodename,
            "config_path": str(self.path),
        }
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _lock(descriptor)
            with os.fdopen(descriptor, "w", closefd=False) as file:
                json.dump({**data, **where}, file)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(self.path)
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = descriptor

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigFileError(
                f"cannot write {self.path} ({error.strerror or error}): make room there, or set LOGDIR to a folder that this "
                "user can write"
            ) from error


def runs_here(trainer: str) -> bool | None:
    """Return whether the process of "trainer HOST:PID", or of anything else followed by these, runs
    on this machine. None if it is on another one, and cannot be looked up.
    """
    host, _, pid = trainer.rpartition(" ")[2].rpartition(":")
    if host != os.uname().nodename or not pid.isdigit():
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"  # ended, and its parent has not asked how


def _look(path: Path) -> _Found | None:
    """Return the file under a name; None if there is none, or a dangling link."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except PermissionError:
        return _Found(held=True, facts={})  # another user's
    with os.fdopen(descriptor, encoding="utf-8") as file:
        try:
            facts = json.load(file)
        except ValueError:
            facts = {}  # torn: it names no trainer
        facts = facts if isinstance(facts, dict) else {}
        lives = f"{facts.get('hostname')}:{facts.get('pid')}"
        locked = _lock(descriptor)
        held = not locked if locked is not None else bool(facts) and runs_here(lives) is not False
    return _Found(held, facts)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file; False if another one holds it, None if its file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("no lock: %s", error)
        return None
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one server at a time choose a name in the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _CLAIM_SECONDS
        while (locked := _lock(descriptor)) is False:
            if time.monotonic() > deadline:
                raise OSError(
                    f"another process has held a lock on the folder for {_CLAIM_SECONDS:g} s"
                )
            time.sleep(_POLL_SECONDS)
        if locked is None:
            logger.warning(
                "[Bridge] %s is on a file system without locks: start one server at a time there",
                folder,
            )
        yield
    finally:
        os.close(descriptor)


def remove_shared(handles: Sequence[Mapping[str, Any] | None]) -> None:
    """Remove what the ranks' weights lie in, where that is a file in shared memory."""
    for handle in handles:
        if handle is not None and handle["kind"] == "shm":
            Path(handle["path"]).unlink(missing_ok=True)
