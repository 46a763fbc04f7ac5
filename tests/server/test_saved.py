# SPDX-License-Identifier: Apache-2.0
"""What the index keeps of a job comes back as it was."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.pipelines.request import RANGES, GenerationRequest, Medium
from vllm_omni_vae.server.job import Job, JobError, JobStatus, Outcome
from vllm_omni_vae.server.png import from_png, to_png
from vllm_omni_vae.server.saved import job_of, record_of, request_from_json, request_to_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def _number(name: str) -> st.SearchStrategy[Any]:
    allowed = RANGES[name]
    whole = st.integers(int(allowed.low), int(allowed.high))
    return whole if allowed.whole else st.floats(allowed.low, allowed.high) | whole


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXT,
    "medium": st.sampled_from(Medium),
    "negative_prompt": st.none() | TEXT,
    "extra_params": st.dictionaries(TEXT, JSON, max_size=3),
    "trace": st.booleans(),
    **{name: st.none() | _number(name) for name in RANGES},
}
REQUESTS = st.fixed_dictionaries(FIELDS).map(lambda values: GenerationRequest(**values))


def test_every_field_is_tried() -> None:
    assert {field.name for field in dataclasses.fields(GenerationRequest)} == {*FIELDS, "images", "mask"}


@given(REQUESTS)
def test_a_request_comes_back(request: GenerationRequest) -> None:
    found = request_from_json(request_to_json(request))
    assert found == request
    for field in dataclasses.fields(request):
        assert type(getattr(found, field.name)) is type(getattr(request, field.name))


def test_the_pixels_are_left_out() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    request = GenerationRequest(prompt="a cat", images=(pixels,), mask=pixels[..., 0])
    assert request_from_json(request_to_json(request)) == GenerationRequest(prompt="a cat")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"medium": "video"}', '{"medium": "sound", "prompt": "x"}'])
def test_what_is_no_request(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        request_from_json(text)


@pytest.mark.parametrize("shape", [(1, 1, 3), (48, 64, 3), (33, 17, 3)])
def test_an_image_comes_back(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = from_png(to_png(image))
    assert found.dtype == np.uint8 and np.array_equal(found, image)


OUTCOME = Outcome(
    stage_durations={"decode": 0.1},
    inference_s=1 / 3,
    peak_memory_mb=(1.5, 2),
    vae=({"a": [1]},),
    vae_use=({"b": 2},),
    traces=("c/rank0.json.gz",),
)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"status": JobStatus.IN_PROGRESS, "progress": 40},
        {"status": JobStatus.FAILED, "progress": 7, "completed_at": 9, "error": JobError("odd", "why", 422)},
        {
            "status": JobStatus.COMPLETED,
            "progress": 100,
            "completed_at": 9,
            "expires_at": 59,
            "outcome": OUTCOME,
        },
    ],
    ids=str,
)
def test_a_job_comes_back(state: dict[str, Any]) -> None:
    job = Job(
        id="video_1",
        serial=3,
        model="m",
        pipeline="P",
        request=GenerationRequest(prompt="a cat", seed=3, width=64, height=48),
        folder=Path("/media/video_1"),
        created_at=5,
        kept=True,
        seconds="2.5",
        remixed_from="video_0",
        **state,
    )
    found = job_of(record_of(job), Path("/media"), 50.0)
    for field in dataclasses.fields(Job):
        if field.name != "changed":
            assert getattr(found, field.name) == getattr(job, field.name), field.name
    assert found.to_json() == job.to_json()
