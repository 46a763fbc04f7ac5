# SPDX-License-Identifier: Apache-2.0
"""The index of jobs on disk: a SQLite database with one writer, which a thread feeds in order."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..errors import ConfigurationError

logger = logging.getLogger(__name__)

# What `file` and SQLite show of the database: whose it is, and how its tables look.
APPLICATION_ID = 0x56414531
SCHEMA_VERSION = 1
MAX_TOMBSTONES = 10_000
_LIVE = "status IN ('queued', 'in_progress')"
_SCHEMA = (
    """CREATE TABLE jobs (
        id TEXT PRIMARY KEY, serial INTEGER NOT NULL UNIQUE, pipeline TEXT NOT NULL, model TEXT NOT NULL,
        seconds TEXT NOT NULL, remixed_from TEXT, created_at INTEGER NOT NULL, request TEXT NOT NULL,
        status TEXT NOT NULL, progress INTEGER NOT NULL, completed_at INTEGER, error TEXT, outcome TEXT)""",
    """CREATE TABLE images (
        job TEXT NOT NULL REFERENCES jobs ON DELETE CASCADE, place INTEGER NOT NULL, png BLOB NOT NULL,
        PRIMARY KEY (job, place))""",
    "CREATE TABLE gone (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, serial INTEGER NOT NULL, reason TEXT)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

Write = Callable[[sqlite3.Connection], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A row of ``jobs``; ``request``, ``error`` and ``outcome`` are JSON."""

    id: str
    serial: int
    pipeline: str
    model: str
    seconds: str
    remixed_from: str | None
    created_at: int
    request: str
    status: str
    progress: int
    completed_at: int | None
    error: str | None
    outcome: str | None


_COLUMNS = [field.name for field in dataclasses.fields(JobRecord)]
_CHANGING = ("status", "progress", "completed_at", "error", "outcome")


@dataclasses.dataclass(frozen=True, slots=True)
class Tombstone:
    """A job that is gone, and how."""

    id: str
    serial: int
    reason: str


class JobIndex:
    """Jobs, the reference images of those that wait, and tombstones, in one file.

    `add`, `change`, `bury` and `flush` return at once. What they ask for is written in their order, each in a
    transaction of its own, and their future is done when it would survive a crash. A change that could not be written
    is tried again with the next. The other methods block.

    Args:
        path: The database; made when it is not there. The caller sees to it that no other process uses it.

    Raises:
        ConfigurationError: it is of another version, damaged, or no such database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owed: dict[str, Write] = {}
        self._failing = False
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._unreadable(error) from None
        try:
            self._open()
        except sqlite3.Error as error:
            self._db.close()
            raise self._unreadable(error) from None
        except ConfigurationError:
            self._db.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="job-index")

    def _open(self) -> None:
        # One process alone needs no shared memory beside the database, which some file systems do not have.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        if not self._pragma("schema_version"):
            self._db.execute("PRAGMA auto_vacuum = FULL")
        else:
            self._check()
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA wal_autocheckpoint = 100")
        self._db.execute("PRAGMA foreign_keys = ON")
        if not self._pragma("schema_version"):
            with self._transaction():
                for statement in _SCHEMA:
                    self._db.execute(statement)

    def _check(self) -> None:
        if self._pragma("application_id") != APPLICATION_ID:
            raise self._unreadable("it is another program's database")
        version = self._pragma("user_version")
        if version != SCHEMA_VERSION:
            raise ConfigurationError(
                f"{self._path} has version {version} and this server reads version {SCHEMA_VERSION}; start the server "
                "that wrote it, or give another --media-storage-path"
            )
        found = self._pragma("quick_check")
        if found != "ok":
            raise self._unreadable(found)

    def _unreadable(self, reason: object) -> ConfigurationError:
        return ConfigurationError(
            f"cannot read the index of jobs {self._path}: {reason}; bring back a copy of it, move the whole folder "
            "away to begin anew, or give another --media-storage-path"
        )

    def _pragma(self, name: str) -> int | str:
        return self._db.execute(f"PRAGMA {name}").fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself after some errors, a full disk among them.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def records(self) -> list[JobRecord]:
        """Return every job in the order of creation. Before the first change only."""
        rows = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs ORDER BY serial")
        return [JobRecord(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]

    def images(self, identity: str) -> list[bytes]:
        """Return the reference images of a job that waits, as PNG. Before the first change only."""
        return [png for (png,) in self._db.execute("SELECT png FROM images WHERE job = ? ORDER BY place", (identity,))]

    def tombstones(self) -> list[Tombstone]:
        """Return what is gone, the oldest first. Before the first change only."""
        return [Tombstone(*row) for row in self._db.execute("SELECT id, serial, reason FROM gone ORDER BY place")]

    def add(self, record: JobRecord, images: Callable[[], Sequence[bytes]]) -> Future[None]:
        """Add a job; ``images`` returns its reference images as PNG and is called on the index' thread."""

        def write(db: sqlite3.Connection) -> None:
            values = [getattr(record, name) for name in _COLUMNS]
            db.execute(f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})", values)
            rows = [(record.id, place, png) for place, png in enumerate(images())]
            db.executemany("INSERT INTO images VALUES (?, ?, ?)", rows)

        return self._submit(write)

    def change(self, record: JobRecord, *, final: bool = True) -> Future[None]:
        """Write where a job stands, and drop its reference images when it waits no more.

        Args:
            record: The job as it is now; one that is not in the index any more is left out.
            final: Whether the job is over. A step on the way never overwrites that, and may be lost with the power.
        """
        only = "" if final else f" AND {_LIVE}"

        def write(db: sqlite3.Connection) -> None:
            values = [getattr(record, name) for name in (*_CHANGING, "id")]
            db.execute(f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in _CHANGING)} WHERE id = ?{only}", values)
            db.execute("DELETE FROM images WHERE job = ?", (record.id,))

        return self._submit(write, owner=record.id if final else None, durable=final)

    def bury(self, tombstone: Tombstone) -> Future[None]:
        """Put a tombstone in the place of a job; the oldest beyond `MAX_TOMBSTONES` go."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM jobs WHERE id = ?", (tombstone.id,))
            values = (tombstone.id, tombstone.serial, tombstone.reason)
            db.execute("INSERT OR IGNORE INTO gone (id, serial, reason) VALUES (?, ?, ?)", values)
            db.execute("DELETE FROM gone WHERE place <= (SELECT max(place) FROM gone) - ?", (MAX_TOMBSTONES,))

        return self._submit(write, owner=tombstone.id)

    def remove(self, identity: str) -> Future[None]:
        """Remove a job without a trace."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM jobs WHERE id = ?", (identity,))

        return self._submit(write, owner=identity)

    def flush(self) -> Future[None]:
        """Try again what is owed; the future fails when it still cannot be written."""
        return self._submit(lambda db: None)

    def _submit(self, write: Write, *, owner: str | None = None, durable: bool = True) -> Future[None]:
        try:
            return self._thread.submit(self._apply, write, owner, durable)
        except RuntimeError as error:
            closed: Future[None] = Future()
            closed.set_exception(error)
            return closed

    def _apply(self, write: Write, owner: str | None, durable: bool) -> None:
        if owner is not None:
            self._owed[owner] = write
            writes = list(self._owed.values())
        else:
            writes = [*self._owed.values(), write]
        try:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable or self._owed else 'NORMAL'}")
            with self._transaction():
                for each in writes:
                    each(self._db)
        except sqlite3.Error as error:
            if not self._failing:
                self._failing = True
                logger.error("cannot write to %s: %s", self._path, error)
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, f"{self._path}: {error}") from None
            raise
        self._failing = False
        self._owed.clear()

    def close(self) -> None:
        """Write what is left and close the file. Safe to call again."""
        self.flush()
        self._thread.shutdown(wait=True)
        self._db.close()
