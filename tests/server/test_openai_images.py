# SPDX-License-Identifier: Apache-2.0
"""The real `openai` client and the image routes, against a real socket."""

import base64
import io
import threading
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import ImageEditCompletedEvent, ImageGenCompletedEvent
from PIL import Image

from vllm_omni_vae.errors import RankError

from .conftest import MODEL, Serve
from .scripted_engine import IMAGES, LAYERS, ScriptedEngine, noise
from .test_reference import saved


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return ScriptedEngine(card=getattr(request, "param", IMAGES))


def pixels(item: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json))))


def test_generate(serve: Serve) -> None:
    server = serve()
    made = server.openai.images.generate(
        prompt="a cat",
        model=MODEL,
        n=2,
        size="32x48",
        quality="high",
        background="auto",
        moderation="low",
        response_format="b64_json",
        output_format="png",
        style="natural",
        user="me",
        safety_identifier="me",
        extra_body={"seed": 5, "num_inference_steps": 2, "negative_prompt": "", "true_cfg_scale": 3},
    )
    assert made.data is not None and len(made.data) == 2 and made.created
    assert (made.size, made.output_format, made.quality, made.background) == ("32x48", "png", "high", "opaque")
    assert made.usage is not None and made.usage.total_tokens == 0
    assert made.usage.input_tokens_details.text_tokens == 0
    (request,) = server.engine.requests
    assert (request.seed, request.num_inference_steps, request.negative_prompt) == (5, 2, "")
    assert np.array_equal(np.stack([pixels(item) for item in made.data]), noise(request))
    assert (made.model_extra or {})["seed"] == 5
    assert [(item.model_extra or {})["seed"] for item in made.data] == [5, 6]
    assert all(item.url is None and item.revised_prompt is None for item in made.data)


def test_edit_one_or_several_images_with_a_mask(serve: Serve, png: bytes) -> None:
    server = serve()
    mask = saved(Image.new("RGBA", (40, 30), (0, 0, 0, 0)))
    one = server.openai.images.edit(image=png, prompt="a cat", input_fidelity="high", extra_body={"seed": 3})
    several = server.openai.images.edit(
        image=[png, ("lies.txt", io.BytesIO(png), "text/plain")],
        mask=mask,
        prompt="a cat",
        size="auto",
        n=2,
        output_format="webp",
        output_compression=90,
        extra_body={"seed": 3, "extra_params": {"shift": 2, "on": True}},
    )
    assert one.data is not None and several.data is not None
    assert (len(one.data), one.quality, several.output_format, len(several.data)) == (1, None, "webp", 2)
    first, second = server.engine.requests
    assert (len(first.images), first.mask, len(second.images)) == (1, None, 2)
    assert all((image == (255, 0, 0)).all() and image.shape == (30, 40, 3) for image in second.images)
    assert second.mask is not None and (second.mask == 255).all()
    assert second.extra_params == {"shift": 2, "on": True}


@pytest.mark.parametrize("engine", [LAYERS], indirect=True)
def test_layers(serve: Serve, png: bytes) -> None:
    server = serve()
    made = server.openai.images.edit(image=png, prompt="a cat", background="transparent", extra_body={"layers": 3})
    assert made.data is not None and made.background == "transparent"
    assert [(item.model_extra or {})["layer"] for item in made.data] == [0, 1, 2]
    assert [pixels(item).shape for item in made.data] == [(48, 64, 4)] * 3


def test_streams(serve: Serve, png: bytes) -> None:
    server = serve()
    plain = server.openai.images.generate(prompt="a cat", n=2, extra_body={"seed": 5})
    with server.openai.images.generate(
        prompt="a cat", n=2, stream=True, partial_images=3, quality="low", extra_body={"seed": 5}
    ) as stream:
        events = list(stream)
    assert plain.data is not None and [event.b64_json for event in events] == [item.b64_json for item in plain.data]
    for event in events:
        assert isinstance(event, ImageGenCompletedEvent) and event.created_at > 1_700_000_000
        assert (event.size, event.quality, event.background, event.output_format) == ("64x48", "low", "opaque", "png")
        assert event.usage.total_tokens == 0
    edits = list(server.openai.images.edit(image=[png, png], prompt="a cat", stream=True))
    assert [type(event) for event in edits] == [ImageEditCompletedEvent]
    assert edits[0].type == "image_edit.completed" and edits[0].quality == "auto"


def test_a_failure_in_a_stream_is_raised(serve: Serve) -> None:
    server = serve()
    server.engine.fault = RankError(1, "MemoryError: no")
    stream = server.openai.images.generate(prompt="a cat", stream=True)
    with pytest.raises(openai.APIError, match="rank 1 failed: MemoryError: no") as raised:
        list(stream)
    assert raised.value.code == "rank_failed"
    assert len(list(server.openai.images.generate(prompt="a cat", stream=True))) == 1


def test_closing_a_stream_cancels_its_job(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    stream = server.openai.images.generate(prompt="a cat", stream=True)
    assert server.engine.running.wait(5)
    stream.close()
    while not server.engine.cancels:
        pass
    server.engine.may_finish.set()
    assert server.openai.images.generate(prompt="a cat").data


def test_refusals_are_the_client_s_exceptions(serve: Serve, png: bytes) -> None:
    server = serve()
    images = server.openai.images
    for call, kind, expected in (
        (lambda: images.generate(prompt="a cat", response_format="url"), openai.BadRequestError, "response_format"),
        (lambda: images.generate(prompt="a cat", model="gpt-image-2"), openai.BadRequestError, "model"),
        (lambda: images.generate(prompt="a cat", n=11), openai.UnprocessableEntityError, "n"),
        (
            lambda: images.generate(prompt="a cat", output_format="svg"),
            openai.UnprocessableEntityError,
            "output_format",
        ),
        (lambda: images.edit(prompt="a cat", image=[png] * 4), openai.UnprocessableEntityError, "image"),
        (lambda: images.edit(prompt="a cat", image=b"x"), openai.BadRequestError, "image"),
        (lambda: images.edit(prompt="a cat", image=png, mask=b"x"), openai.BadRequestError, "mask"),
        (lambda: images.edit(prompt="a cat", image=png, markup=png), openai.UnprocessableEntityError, "markup"),
    ):
        with pytest.raises(kind) as refused:
            call()
        assert refused.value.param == expected
    assert server.engine.requests == []


def test_sixteen_images_and_a_mask_are_read(serve: Serve, png: bytes) -> None:
    server = serve()
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        server.openai.images.edit(image=[png] * 16, mask=png, prompt="a cat")
    assert (refused.value.code, refused.value.param) == ("too_many_images", "image")
    with pytest.raises(openai.BadRequestError):
        server.openai.images.edit(image=[png] * 17, mask=png, prompt="a cat")


def test_clients_wait_side_by_side(serve: Serve) -> None:
    server = serve()
    answers: dict[int, Any] = {}

    def ask(seed: int) -> None:
        answers[seed] = server.openai.images.generate(prompt="a cat", extra_body={"seed": seed})

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for seed, request in ((request.seed, request) for request in server.engine.requests):
        assert seed is not None and np.array_equal(pixels(answers[seed].data[0]), noise(request)[0])
    assert len(answers) == 4
