# SPDX-License-Identifier: Apache-2.0
"""Jobs: order, pages, races, expiry, and a progress that never falls."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni_vae.errors import ConfigurationError
from vllm_omni_vae.pipelines.request import GenerationRequest, Medium, Stage
from vllm_omni_vae.server import jobs
from vllm_omni_vae.server.job import Job, JobError, JobStatus, Outcome
from vllm_omni_vae.server.jobs import JobStore
from vllm_omni_vae.server.media import Variant
from vllm_omni_vae.server.pictures import Encoding

REQUEST = GenerationRequest(prompt="a cat", width=64, height=48, num_frames=9, fps=8, seed=3)
OUTCOME = Outcome(stage_durations={"decode": 0.5}, inference_s=1.0, peak_memory_mb=(1.0, 2.0), vae=({"a": 1},))
ERROR = JobError("rank_failed", "rank 1 failed")
TTL = 100.0


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[JobStore]:
    store = JobStore(str(tmp_path / "media"), TTL, clock=clock)
    store.open()
    yield store
    store.close()


def create(store: JobStore, request: GenerationRequest = REQUEST, **more: Any) -> Job:
    return asyncio.run(store.create(request, model="m", **{"seconds": "1.125", **more}))


def complete(store: JobStore, job: Job) -> bool:
    if job.live and job.listed:
        job.folder.mkdir()
        for variant in Variant:
            job.path(variant).write_bytes(b"x")
    return asyncio.run(store.complete(job, OUTCOME))


def test_a_new_job_on_the_wire(store: JobStore) -> None:
    job = create(store)
    assert job.to_json() == {
        "id": job.id,
        "object": "video",
        "model": "m",
        "prompt": "a cat",
        "status": "queued",
        "progress": 0,
        "created_at": 1000,
        "completed_at": None,
        "expires_at": None,
        "seconds": "1.125",
        "size": "64x48",
        "error": None,
        "remixed_from_video_id": None,
        "fps": 8,
        "num_frames": 9,
        "seed": 3,
        "stage_durations": None,
        "peak_memory_mb": None,
        "vae": None,
        "vae_use": None,
        "traces": None,
    }


def test_a_finished_job_on_the_wire(store: JobStore, clock: Clock) -> None:
    job, failed = create(store), create(store)
    fields = set(job.to_json())
    clock.now += 7
    assert store.start(job) and complete(store, job)
    wire = job.to_json()
    assert (wire["status"], wire["progress"], wire["completed_at"], wire["expires_at"]) == (
        "completed",
        100,
        1007,
        1107,
    )
    assert (wire["stage_durations"], wire["peak_memory_mb"], wire["vae"]) == ({"decode": 0.5}, [1.0, 2.0], [{"a": 1}])
    assert store.fail(failed, ERROR)
    assert failed.to_json()["error"] == {"code": "rank_failed", "message": "rank 1 failed"}
    assert failed.to_json()["expires_at"] is None
    assert set(wire) == set(failed.to_json()) == fields


def test_identifiers_cannot_be_guessed(store: JobStore) -> None:
    made = {create(store).id for _ in range(50)}
    assert len(made) == 50
    assert all(identity.startswith("video_") and len(identity) == 38 for identity in made)


def test_images_are_not_kept(store: JobStore) -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    request = GenerationRequest(prompt="a cat", images=(image,))
    assert create(store, request).request.images == ()


def test_images_are_answered_and_not_listed(store: JobStore) -> None:
    pixels = np.zeros((48, 64, 3), np.uint8)
    request = GenerationRequest(prompt="a cat", medium=Medium.IMAGE, images=(pixels,), mask=pixels[..., 0])
    clip = create(store)
    job = create(store, request, encoding=Encoding(format="webp"))
    assert job.id.startswith("image_") and not job.listed and clip.listed
    assert (job.encoding, job.request.images, job.request.mask) == (Encoding(format="webp"), (), None)
    page = store.page(after=None, limit=9, order="asc")
    assert page is not None and page.jobs == [clip] and not page.has_more
    assert store.get(job.id) is None and store.page(after=job.id, limit=9, order="asc") is None
    assert store.start(job) and complete(store, job)
    assert store.delete(job.id) is job and store.gone(job.id) is None and store.delete(job.id) is None


def test_images_that_nobody_fetched_expire(store: JobStore, clock: Clock) -> None:
    request = GenerationRequest(prompt="a cat", medium=Medium.IMAGE)
    job = create(store, request, encoding=Encoding())
    complete(store, job)
    clock.now += TTL
    assert store.expire() == [job] and store.delete(job.id) is None


def test_progress_never_falls_and_is_100_only_at_the_end(store: JobStore) -> None:
    job = create(store)
    seen = [job.progress]
    events = [(Stage.ENCODE, n, 4) for n in range(5)] + [(Stage.DENOISE, n, 10) for n in range(11)]
    events += [(Stage.DECODE, n, 6) for n in range(7)] + [(Stage.DENOISE, 1, 10), (Stage.EXPORT, 0, 9)]
    events += [(Stage.EXPORT, n, 9) for n in range(10)] + [(Stage.DECODE, 9, 6), (Stage.EXPORT, 1, 0)]
    for event in events:
        assert store.advance(job, *event)
        seen.append(job.progress)
    assert seen == sorted(seen) and seen[-1] == 99
    assert len(set(seen)) > 20
    assert job.stage is Stage.EXPORT and job.status is JobStatus.IN_PROGRESS
    complete(store, job)
    assert job.progress == 100


def test_every_stage_moves_the_progress(store: JobStore) -> None:
    job = create(store)
    for stage in Stage:
        before = job.progress
        store.advance(job, stage, 1, 1)
        assert job.progress > before


def test_a_clip_without_a_reference_skips_the_encode_stage(store: JobStore) -> None:
    job = create(store)
    store.advance(job, Stage.DENOISE, 0, 4)
    assert 0 < job.progress < 10


@pytest.mark.parametrize("first", ["complete", "fail", "delete"])
def test_whoever_is_first_wins(store: JobStore, first: str) -> None:
    job = create(store)
    moves = {
        "complete": lambda: complete(store, job),
        "fail": lambda: store.fail(job, ERROR),
        "delete": lambda: store.delete(job.id) is job,
    }
    assert moves[first]()
    known = job.to_json()
    assert not store.start(job) and not store.advance(job, Stage.DECODE, 1, 2)
    assert not moves["complete"]() and not moves["fail"]()
    assert job.to_json() == known
    assert moves["delete"]() is (first != "delete")
    assert store.get(job.id) is None and store.gone(job.id) == "deleted"


def walk(store: JobStore, order: jobs.ListOrder, limit: int) -> list[str]:
    found: list[str] = []
    after = None
    while True:
        page = store.page(after=after, limit=limit, order=order)
        assert page is not None
        assert len(page.jobs) <= limit
        found += [job.id for job in page.jobs]
        if not page.has_more:
            return found
        after = found[-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_pages(store: JobStore, limit: int) -> None:
    made = [create(store).id for _ in range(7)]
    assert walk(store, "asc", limit) == made
    assert walk(store, "desc", limit) == made[::-1]


def test_pages_of_nothing(store: JobStore) -> None:
    page = store.page(after=None, limit=3, order="asc")
    assert page is not None and page.jobs == [] and not page.has_more
    assert store.page(after="video_never", limit=3, order="asc") is None


def test_paging_goes_on_after_a_job_that_is_gone(store: JobStore) -> None:
    made = [create(store).id for _ in range(5)]
    store.delete(made[2])
    for order, rest in (("asc", made[3:]), ("desc", made[1::-1])):
        page = store.page(after=made[2], limit=9, order=order)
        assert page is not None and [job.id for job in page.jobs] == rest


def test_what_is_finished_expires(store: JobStore, clock: Clock) -> None:
    done, failed, waiting = create(store), create(store), create(store)
    complete(store, done)
    store.fail(failed, ERROR)
    clock.now += TTL - 1
    assert store.expire() == []
    clock.now += 1
    assert store.expire() == [done, failed]
    assert (store.gone(done.id), store.gone(failed.id), store.gone(waiting.id)) == ("expired", "expired", None)
    assert store.get(waiting.id) is waiting and store.get(done.id) is None


def test_tombstones_are_not_kept_for_ever(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_TOMBSTONES", 3)
    made = [create(store).id for _ in range(5)]
    for identity in made:
        store.delete(identity)
    assert [store.gone(identity) for identity in made] == [None, None, "deleted", "deleted", "deleted"]


def test_a_withdrawn_job_leaves_no_trace(store: JobStore) -> None:
    job = create(store)
    store.withdraw(job)
    assert store.get(job.id) is None and store.gone(job.id) is None


def test_files(store: JobStore, tmp_path: Path) -> None:
    job = create(store)
    assert job.path(Variant.VIDEO) == tmp_path / "media" / job.id / "video.mp4"
    store.discard_files(job)
    job.folder.mkdir()
    job.path(Variant.VIDEO).write_bytes(b"x")
    store.discard_files(job)
    assert not job.folder.exists()
    store.close()
    assert store.folder.is_dir()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="--media-storage-path"):
            JobStore(str(folder), TTL)


def test_a_temporary_folder_goes_with_the_store() -> None:
    store = JobStore(None, TTL)
    store.open()
    job = create(store)
    assert not store.outlives(job)
    job.folder.mkdir()
    assert store.folder.is_dir()
    store.close()
    assert not store.folder.exists()
    store.close()


def test_every_change_can_be_waited_for(store: JobStore) -> None:
    async def follow() -> int:
        job = await store.create(REQUEST, model="m", kept=False)

        async def complete() -> bool:
            return await store.complete(job, OUTCOME)

        async def now(move: Callable[[], object]) -> object:
            return move()

        changes = 0
        for move in (
            now(lambda: store.start(job)),
            now(lambda: store.advance(job, Stage.DENOISE, 1, 2)),
            complete(),
            now(lambda: store.delete(job.id)),
        ):
            changed = job.changed
            await move
            await asyncio.wait_for(changed.wait(), 1)
            changes += 1
        return changes

    assert asyncio.run(follow()) == 4
