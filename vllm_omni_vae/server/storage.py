# SPDX-License-Identifier: Apache-2.0
"""The folder of finished clips: this server's alone, and free of what a crash left half done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import IO

from ..errors import ConfigurationError
from .media import Variant

logger = logging.getLogger(__name__)

LOCK = "jobs.lock"
INDEX = "jobs.sqlite3"
_CLIP = re.compile(r"video_[0-9a-f]{32}")
_OURS = re.compile(_CLIP.pattern + r"(\.part)?")
# A quota of the user or a limit of the process stops a file just as a full disk does.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_full(error: BaseException) -> bool:
    """Whether ``error`` says that nothing more can be written."""
    return isinstance(error, OSError) and error.errno in _FULL


class MediaFolder:
    """One folder for each clip, named by its job, and the index beside them. Its methods block.

    Args:
        folder: Where; None for a temporary folder that `close` removes.

    Raises:
        ConfigurationError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="vllm-omni-vae-") if folder is None else None
        self._lock: IO[str] | None = None
        self.path = Path(self._temporary.name if self._temporary else str(folder)).resolve()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            raise ConfigurationError(f"cannot keep videos in {self.path}: {error}; see --media-storage-path") from None

    @property
    def lasting(self) -> bool:
        """Whether it is still there after the server has ended."""
        return self._temporary is None

    @property
    def index(self) -> Path:
        """The file of the index."""
        return self.path / INDEX

    def claim(self) -> None:
        """Take the folder for this process, until `close`.

        Raises:
            ConfigurationError: another server has it, it cannot be locked, or its clips have lost their index.
        """
        try:
            lock = (self.path / LOCK).open("a+")
        except OSError as error:
            raise ConfigurationError(f"cannot lock {self.path}: {error}; see --media-storage-path") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigurationError(
                f"another server (process {owner}) keeps its videos in {self.path}; "
                "stop it, or give each server a --media-storage-path of its own"
            ) from None
        except OSError as error:
            with contextlib.suppress(OSError):
                lock.close()
            raise ConfigurationError(
                f"cannot lock {self.path}: {error}; give a --media-storage-path that has room, on a file system that "
                "has locks"
            ) from None
        self._lock = lock
        if not self.index.exists() and (clips := [name for name in self._ours() if _CLIP.fullmatch(name)]):
            self.close()
            raise ConfigurationError(
                f"{self.path} has {len(clips)} videos but not the {INDEX} that knows whose they are; bring it back, "
                "or move the videos away, or give another --media-storage-path"
            )

    def clean(self, keep: Container[str]) -> None:
        """Remove what this kind of server made, but for the clips of the jobs ``keep``; leave everything else."""
        orphans = [name for name in self._ours() if name not in keep]
        for name in orphans:
            self.discard(name)
        if orphans:
            logger.info("removed %d unfinished or deleted videos from %s", len(orphans), self.path)

    def _ours(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.path) if _OURS.fullmatch(entry.name) and entry.is_dir()]

    def holds(self, identity: str) -> bool:
        """Whether every file of the clip is there."""
        return all((self.path / identity / variant.filename).is_file() for variant in Variant)

    def size(self, identity: str) -> int:
        """Bytes of the clip's files."""
        return sum(entry.stat().st_size for entry in os.scandir(self.path / identity))

    def settle(self, identity: str) -> int:
        """Return the bytes of the clip's files once they would survive a loss of power, too."""
        folder = self.path / identity
        for path in (*folder.iterdir(), folder, self.path):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        return self.size(identity)

    def discard(self, name: str) -> None:
        """Remove one clip's files, if there are any."""
        try:
            shutil.rmtree(self.path / name)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("cannot remove the files of %s: %s", name, error)

    def close(self) -> None:
        """Leave the folder to others, or remove it if it is temporary. Safe to call again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()
