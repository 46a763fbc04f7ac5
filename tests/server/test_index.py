# SPDX-License-Identifier: Apache-2.0
"""The index of jobs: order, what is owed after a failure, and databases that are refused."""

import dataclasses
import errno
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae.errors import ConfigurationError
from vllm_omni_vae.server import index as module
from vllm_omni_vae.server.index import SCHEMA_VERSION, JobIndex, JobRecord, Tombstone


def record(identity: str, serial: int = 1, **more: Any) -> JobRecord:
    values: dict[str, Any] = {
        "pipeline": "P",
        "model": "m",
        "seconds": "1",
        "remixed_from": None,
        "created_at": 1,
        "request": "{}",
        "status": "queued",
        "progress": 0,
        "completed_at": None,
        "error": None,
        "outcome": None,
    }
    return JobRecord(id=identity, serial=serial, **{**values, **more})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite3"


@pytest.fixture
def index(path: Path) -> Iterator[JobIndex]:
    index = JobIndex(path)
    yield index
    index.close()


def again(index: JobIndex, path: Path) -> JobIndex:
    index.close()
    return JobIndex(path)


def test_what_was_written_is_there_again(index: JobIndex, path: Path) -> None:
    one, two = record("a", 2), record("b", 1, remixed_from="x", error='{"k": 1}', outcome="{}", completed_at=5)
    for each, images in ((one, [b"1", b"2"]), (two, [])):
        index.add(each, lambda images=images: images).result(5)
    index.bury(Tombstone("c", 9, "deleted")).result(5)
    found = again(index, path)
    assert found.records() == [two, one]
    assert found.images("a") == [b"1", b"2"] and found.images("b") == []
    assert found.tombstones() == [Tombstone("c", 9, "deleted")]
    found.close()


def test_images_go_when_the_job_waits_no_more(index: JobIndex, path: Path) -> None:
    for place, identity in enumerate("abc"):
        index.add(record(identity, place), lambda: [b"png"])
    index.change(record("a", status="in_progress", progress=1), final=False)
    index.bury(Tombstone("b", 1, "deleted"))
    found = again(index, path)
    assert [found.images(identity) for identity in "abc"] == [[], [], [b"png"]]
    assert [(row.id, row.status) for row in found.records()] == [("a", "in_progress"), ("c", "queued")]
    found.close()


def test_a_step_on_the_way_never_overwrites_the_end(index: JobIndex, path: Path) -> None:
    index.add(record("a"), list)
    index.change(record("a", status="completed", progress=100))
    index.change(record("a", status="in_progress", progress=99), final=False)
    found = again(index, path)
    assert [(row.status, row.progress) for row in found.records()] == [("completed", 100)]
    found.close()


def test_a_job_that_is_gone_is_not_changed_and_leaves_one_tombstone(index: JobIndex, path: Path) -> None:
    index.add(record("a"), list)
    for _ in range(2):
        index.bury(Tombstone("a", 1, "deleted"))
    index.change(record("a", status="completed"))
    index.add(record("b", 2), list)
    index.remove("b")
    found = again(index, path)
    assert found.records() == [] and found.tombstones() == [Tombstone("a", 1, "deleted")]
    found.close()


def test_tombstones_are_not_kept_for_ever(index: JobIndex, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    for serial in range(7):
        index.bury(Tombstone(f"v{serial}", serial, "expired"))
    found = again(index, path)
    assert [stone.serial for stone in found.tombstones()] == [4, 5, 6]
    found.close()


def test_nobody_waits_for_the_disk(index: JobIndex) -> None:
    hold = threading.Event()
    slow = index.add(record("a"), lambda: [b"x"] if hold.wait(10) else [])
    later = index.change(record("a", status="failed"))
    assert not slow.done() and not later.done()
    hold.set()
    assert later.result(5) is None and slow.done()


def fill(index: JobIndex) -> None:
    """Let the database grow no more, as on a full disk."""
    pages = index._db.execute("PRAGMA page_count").fetchone()[0]
    index._db.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_says_so_and_what_is_owed_is_written_later(
    index: JobIndex, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index.add(record("a"), list).result(5)
    fill(index)
    with pytest.raises(OSError) as raised:
        index.add(record("b", 2), lambda: [b"x" * 100_000]).result(5)
    assert raised.value.errno == errno.ENOSPC
    for _ in range(2):
        with pytest.raises(OSError):
            index.change(record("a", status="failed", error="e" * 100_000)).result(5)
    index.change(record("a", status="in_progress"), final=False).exception(5)
    assert sum("cannot write to" in line for line in caplog.messages) == 1
    index._db.execute("PRAGMA max_page_count = 4294967294")
    index.flush().result(5)
    found = again(index, path)
    assert [(row.id, row.status, len(row.error or "")) for row in found.records()] == [("a", "failed", 100_000)]
    found.close()


def test_a_closed_index_takes_nothing_more(index: JobIndex, path: Path) -> None:
    index.close()
    assert isinstance(index.change(record("a")).exception(5), RuntimeError)
    index.close()


def test_the_file_shrinks_again(index: JobIndex, path: Path) -> None:
    for serial in range(4):
        index.add(record(f"v{serial}", serial), lambda: [b"x" * 500_000])
    index.flush().result(5)
    for serial in range(4):
        index.bury(Tombstone(f"v{serial}", serial, "deleted"))
    index.close()
    assert path.stat().st_size < 100_000 and [file.name for file in path.parent.iterdir()] == [path.name]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError, match="--media-storage-path") as raised:
        JobIndex(path)
    return str(raised.value)


def test_a_newer_database_is_refused_and_left_alone(index: JobIndex, path: Path) -> None:
    index.add(record("a"), list)
    index.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = path.read_bytes()
    assert f"has version {SCHEMA_VERSION + 1} and this server reads version {SCHEMA_VERSION}" in refusal(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE jobs (id)")
    db.close()
    assert "another program's database" in refusal(path)


def test_damage_is_refused(index: JobIndex, path: Path) -> None:
    for serial in range(40):
        index.add(record(f"v{serial}", serial, request="x" * 1000), list)
    index.close()
    whole = path.read_bytes()
    for damaged in (b"no database at all" * 100, whole[:5000], whole[:8192] + b"\xff" * 8192 + whole[16384:]):
        path.write_bytes(damaged)
        assert "cannot read the index of jobs" in refusal(path)
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    found = again(index, path)
    assert len(found.records()) == 40
    found.close()


def test_an_empty_file_is_a_new_index(path: Path) -> None:
    path.touch()
    index = JobIndex(path)
    assert index.records() == [] and index.tombstones() == []
    index.close()


def test_a_folder_in_its_place_is_refused(path: Path) -> None:
    path.mkdir()
    assert "cannot read the index of jobs" in refusal(path)


def test_a_record_is_all_of_a_row(index: JobIndex) -> None:
    columns = [row[1] for row in index._db.execute("PRAGMA table_info(jobs)")]
    assert columns == [field.name for field in dataclasses.fields(JobRecord)]
