# SPDX-License-Identifier: Apache-2.0
"""What the image routes answer, case by case."""

import base64
import dataclasses
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from vllm_omni_vae.errors import EngineError, RequestError
from vllm_omni_vae.pipelines.request import Task

from .conftest import Running, Serve
from .scripted_engine import CARD, DECISION, IMAGES, LAYERS, ScriptedEngine
from .test_reference import saved
from .test_videos import error_of

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return ScriptedEngine(card=getattr(request, "param", IMAGES))


layered = pytest.mark.parametrize("engine", [LAYERS], indirect=True)
of_clips = pytest.mark.parametrize("engine", [CARD], indirect=True)


def generate(server: Running, **fields: Any) -> httpx.Response:
    return server.http.post(GENERATIONS, json={"prompt": "a cat", **fields})


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def edit(server: Running, *files: tuple[str, bytes], **fields: str) -> httpx.Response:
    return server.http.post(EDITS, data={"prompt": "a cat", **fields}, files=list(files))


def pictures(answer: httpx.Response) -> list[np.ndarray]:
    assert answer.status_code == 200, answer.text
    items = answer.json()["data"]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))) for item in items]


def kept(server: Running) -> list[Any]:
    return [*server.http.get("/v1/videos").json()["data"], *server.clips()]


def test_an_answer(serve: Serve) -> None:
    server = serve(served_model_name=("one", "häuser 猫"))
    answer = generate(server, n=2, seed=5, size="32x48", quality="high", model="häuser 猫", user="me")
    body = answer.json()
    ours = {"seed", "vae", "vae_use", "traces"}
    assert set(body) == {"created", "data", "size", "output_format", "background", "quality", "usage", *ours}
    assert body["vae"] == [DECISION]
    assert [(use["rank"], use["tiles"]) for use in body["vae_use"]] == [(0, 4), (1, 2)]
    assert (body["size"], body["output_format"], body["background"], body["seed"]) == ("32x48", "png", "opaque", 5)
    assert body["quality"] == "high" and body["created"] > 1_700_000_000
    assert [set(item) for item in body["data"]] == [{"b64_json", "seed"}] * 2
    assert [item["seed"] for item in body["data"]] == [5, 6]
    assert answer.headers["x-request-id"].startswith("image_") and answer.headers["x-model"] == "h?user ?"
    assert float(answer.headers["x-inference-time-s"]) >= 0
    assert set(json.loads(answer.headers["x-stage-durations"])) == {"denoise", "decode", "export"}
    assert float(answer.headers["x-peak-memory-mb"]) == 12.5
    assert kept(server) == []


def test_each_image_has_the_seed_after_the_last_one_s(serve: Serve) -> None:
    server = serve()
    first, second = pictures(generate(server, n=2, seed=5))
    assert first.shape == second.shape == (48, 64, 3) and not np.array_equal(first, second)
    assert np.array_equal(pictures(generate(server, seed=6))[0], second)


def test_the_same_seed_gives_the_same_bytes_whichever_way_it_is_asked(serve: Serve) -> None:
    server = serve()
    answers = [
        generate(server, seed=5, width=32, height=48),
        server.http.post(GENERATIONS, data={"prompt": "a cat", "seed": "5", "size": "32x48"}),
        server.http.post(GENERATIONS, files={"prompt": (None, "a cat"), "seed": (None, "5"), "size": (None, "32x48")}),
    ]
    assert len({answer.json()["data"][0]["b64_json"] for answer in answers}) == 1


def test_what_the_engine_gets(serve: Serve) -> None:
    server = serve()
    asked = {"n": 2, "negative_prompt": "a dog", "true_cfg_scale": 3.5, "num_inference_steps": 2}
    generate(server, **asked, resolution=640, extra_params={"shift": 2})
    (request,) = server.engine.requests
    assert (request.num_images, request.negative_prompt, request.true_cfg_scale) == (2, "a dog", 3.5)
    assert (request.width, request.height, request.num_frames, request.fps) == (64, 48, None, None)
    assert request.extra_params == {"shift": 2, "resolution": 640}


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_formats(serve: Serve, kind: str) -> None:
    server = serve()
    best, worst = (generate(server, output_format=kind, seed=1, **more) for more in ({}, {"output_compression": 0}))
    assert best.json()["output_format"] == kind
    first, second = (base64.b64decode(answer.json()["data"][0]["b64_json"]) for answer in (best, worst))
    assert Image.open(io.BytesIO(first)).format == kind.upper() and len(second) < len(first)


@layered
def test_layers_are_rgba_images_bottom_first(serve: Serve, png: bytes) -> None:
    server = serve()
    answer = edit(server, ("image", png), n="2", layers="3", seed="5")
    found = pictures(answer)
    assert [picture.shape for picture in found] == [(48, 64, 4)] * 6
    body = answer.json()
    assert [(item["seed"], item["layer"]) for item in body["data"]] == [(s, i) for s in (5, 6) for i in range(3)]
    assert body["background"] == "transparent"
    alone = pictures(edit(server, ("image", png), layers="3", seed="6"))
    assert np.array_equal(np.stack(found[3:]), np.stack(alone))
    assert server.engine.requests[0].images[0].shape == (30, 40, 4)
    assert len(pictures(edit(server, ("image", png)))) == 2, "the model's default"


@layered
def test_backgrounds(serve: Serve, png: bytes) -> None:
    server = serve()
    for fields, channels, background in (
        ({}, 4, "transparent"),
        ({"background": "transparent", "output_format": "webp"}, 4, "transparent"),
        ({"background": "opaque"}, 3, "opaque"),
        ({"output_format": "jpeg"}, 3, "opaque"),
    ):
        answer = edit(server, ("image", png), **fields)
        assert answer.json()["background"] == background
        assert [picture.shape[-1] for picture in pictures(answer)] == [channels] * 2


def test_references_keep_their_size_and_order(serve: Serve, png: bytes) -> None:
    server = serve()
    blue = saved(Image.new("RGBA", (7, 5), (0, 0, 255, 128)), "WEBP", lossless=True)
    green = saved(Image.new("L", (300, 20), 9), "JPEG")
    assert edit(server, ("image[]", png), ("image[]", blue), ("image[]", green)).status_code == 200
    assert edit(server, ("image", png), ("image", blue), ("image", green)).status_code == 200
    urls = [data_url(data) for data in (png, blue, green)]
    objects = [{"image_url": url} for url in urls]
    for fields in ({"images": objects}, {"image": objects}, {"url": urls}):
        assert server.http.post(EDITS, json={"prompt": "a cat", **fields}).status_code == 200
    parts = [("url[]", (None, url)) for url in urls]
    assert server.http.post(EDITS, files=[("prompt", (None, "a cat")), *parts]).status_code == 200
    assert len(server.engine.requests) == 6
    for request in server.engine.requests:
        first, second, third = request.images
        assert (first.shape, second.shape, third.shape) == ((30, 40, 3), (5, 7, 3), (20, 300, 3))
        assert (first == (255, 0, 0)).all() and (second == (127, 127, 255)).all() and (third == 9).all()
        assert (request.width, request.height, request.mask) == (64, 48, None)


def test_a_mask_belongs_to_the_first_image(serve: Serve, png: bytes) -> None:
    server = serve()
    mask = Image.new("L", (40, 30))
    mask.paste(255, (0, 0, 20, 30))
    other = saved(Image.new("RGB", (9, 9)))
    assert edit(server, ("image[]", png), ("image[]", other), ("mask", saved(mask))).status_code == 200
    fields = {"image": data_url(png), "mask_image": {"image_url": data_url(saved(mask))}}
    assert server.http.post(EDITS, json={"prompt": "a cat", **fields}).status_code == 200
    for request in server.engine.requests:
        assert request.mask is not None and request.mask.shape == (30, 40)
        assert (request.mask[:, :20] == 255).all() and (request.mask[:, 20:] == 0).all()
    refused = edit(server, ("image[]", other), ("image[]", png), ("mask", saved(mask)))
    assert error_of(refused) == (400, "mask", "invalid_mask") and "9x9" in refused.text


REFUSALS: list[tuple[dict[str, Any], tuple[int, str, str]]] = [
    ({"size": "853x480"}, (422, "width", "unsupported_size")),
    ({"width": 60}, (422, "width", "unsupported_size")),
    ({"size": "1024x1024"}, (422, "size", "too_large")),
    ({"size": "auto", "width": 1024, "height": 1024}, (422, "width", "too_large")),
    ({"n": 5}, (422, "n", "too_large")),
    ({"n": 11}, (422, "n", "invalid_value")),
    ({"model": "gpt-image-1"}, (400, "model", "model_not_found")),
    ({"response_format": "url"}, (400, "response_format", "unsupported_parameter")),
    ({"output_compression": 5}, (400, "output_compression", "conflicting_parameters")),
    ({"background": "transparent"}, (400, "background", "unsupported_parameter")),
    ({"guidance_scale": 5}, (400, "guidance_scale", "unsupported_parameter")),
    ({"layers": 2}, (400, "layers", "unsupported_parameter")),
    ({"seconds": "4"}, (422, "seconds", "unknown_parameter")),
    ({"fps": 8, "num_frames": 9}, (422, "fps", "unknown_parameter")),
    ({"extra_params": {"zoom": 1}}, (422, "extra_params", "unknown_parameter")),
    ({"extra_params": {"reference_fit": "pad"}}, (422, "extra_params", "unknown_parameter")),
    ({"prompt": ""}, (422, "prompt", "invalid_value")),
]
OF_EDITS: list[tuple[dict[str, Any], tuple[int, str, str]]] = [
    ({}, (422, "image", "missing_required_parameter")),
    ({"image": []}, (422, "image", "invalid_value")),
    ({"images": ["data:x"]}, (400, "images", "invalid_data_url")),
    ({"url": ["https://a.example/x"]}, (400, "url", "unsupported_url")),
    ({"image": "data:image/png;base64,"}, (400, "image", "empty_image")),
    ({"image": "data:image/png;base64,AAAA"}, (400, "image", "invalid_image")),
    ({"image": ["data:x"] * 4}, (422, "image", "too_many_images")),
    ({"url": ["data:x"] * 4}, (422, "url", "too_many_images")),
]


def test_what_is_refused_names_the_field(serve: Serve, png: bytes) -> None:
    server = serve(max_pixels=512 * 512, max_frames=4)
    for fields, expected in REFUSALS:
        assert error_of(generate(server, **fields)) == expected
        picture = {"image": data_url(png)}
        assert error_of(server.http.post(EDITS, json={"prompt": "a cat", **picture, **fields})) == expected
    for fields, expected in OF_EDITS:
        assert error_of(server.http.post(EDITS, json={"prompt": "a cat", **fields})) == expected
    large = saved(Image.new("1", (512, 513)))
    assert error_of(edit(server, ("image", large))) == (413, "image", "image_too_large")
    assert error_of(edit(server, ("image", png), ("mask", b""))) == (400, "mask", "empty_image")
    second = edit(server, ("image[]", png), ("image[]", b"x"))
    assert error_of(second) == (400, "image", "invalid_image") and "reference image 2" in second.text
    assert server.engine.requests == [] and kept(server) == []


def test_a_webp_file_has_no_more_room(serve: Serve) -> None:
    server = serve()
    answer = generate(server, width=16384, height=16, output_format="webp")
    assert error_of(answer) == (422, "output_format", "too_large")


@layered
def test_a_field_that_the_model_has_no_use_for_is_named_as_the_client_named_it(serve: Serve, png: bytes) -> None:
    server = serve()
    mask = saved(Image.new("L", (40, 30), 255))
    assert error_of(edit(server, ("image", png), ("mask", mask)))[:2] == (400, "mask")
    assert error_of(edit(server, ("image", png), ("mask_image", mask)))[:2] == (400, "mask_image")


@of_clips
def test_a_model_of_clips_makes_no_images(serve: Serve, png: bytes) -> None:
    server = serve()
    for answer in (generate(server), edit(server, ("image", png)), edit(server, *[("image", png)] * 9)):
        assert error_of(answer) == (400, None, "unsupported_task")
        assert "ask for one at /v1/videos" in answer.json()["error"]["message"]


def test_a_model_of_images_makes_no_clips(serve: Serve, png: bytes) -> None:
    server = serve()
    for path in ("/v1/videos", "/v1/videos/sync"):
        for files in ({}, {"input_reference": png}):
            answer = server.http.post(path, data={"prompt": "a cat"}, files=files)
            assert error_of(answer) == (400, None, "unsupported_task")
            assert "/v1/images/generations" in answer.json()["error"]["message"]


@pytest.mark.parametrize("engine", [dataclasses.replace(IMAGES, tasks=frozenset({Task.IMAGE_TO_IMAGE}))], indirect=True)
def test_a_model_that_only_edits(serve: Serve, png: bytes) -> None:
    server = serve()
    assert error_of(generate(server)) == (400, "image", "unsupported_task")
    assert len(pictures(edit(server, ("image", png)))) == 1


@pytest.mark.parametrize("engine", [dataclasses.replace(IMAGES, tasks=frozenset({Task.TEXT_TO_IMAGE}))], indirect=True)
def test_a_model_that_only_makes_images_out_of_text(serve: Serve, png: bytes) -> None:
    server = serve()
    assert len(pictures(generate(server))) == 1
    assert error_of(edit(server, ("image", b"not looked at"))) == (400, "image", "unsupported_task")
    answer = server.http.post(EDITS, json={"prompt": "a cat", "url": "data:x"})
    assert error_of(answer) == (400, "url", "unsupported_task")


def test_there_are_no_variations(serve: Serve, png: bytes) -> None:
    answer = serve().http.post("/v1/images/variations", files={"image": png})
    assert error_of(answer) == (501, None, "not_implemented") and answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (EngineError("rank 1 died", code="worker_died"), (500, None, "worker_died")),
        (RequestError("too many tokens", param="prompt", code="too_long"), (422, None, "too_long")),
        (ZeroDivisionError(), (500, None, "internal_error")),
    ],
)
def test_failures(serve: Serve, fault: Exception, expected: tuple[int, str | None, str]) -> None:
    server = serve()
    server.engine.fault = fault
    answer = generate(server)
    assert error_of(answer) == expected
    assert answer.headers.get("x-should-retry") == ("false" if expected[0] == 500 else None)
    assert generate(server).status_code == 200


@pytest.mark.parametrize("shape", [(0, 48, 64, 3), (2, 48, 64, 3), (1, 64, 48, 3), (1, 48, 64, 4)])
def test_output_that_is_not_what_was_asked_for(serve: Serve, shape: tuple[int, ...]) -> None:
    server = serve()
    server.engine.output = np.zeros(shape, np.uint8)
    assert error_of(generate(server)) == (500, None, "invalid_output")


def test_the_docs_tell_the_fields(serve: Serve) -> None:
    paths = serve().http.get("/openapi.json").json()["paths"]
    for path, fields in ((GENERATIONS, {"prompt", "n", "layers"}), (EDITS, {"prompt", "image", "mask", "url"})):
        content = paths[path]["post"]["requestBody"]["content"]
        assert set(content) == {"multipart/form-data", "application/json"}
        schema = content["multipart/form-data"]["schema"]
        assert fields <= set(schema["properties"]) and "$ref" not in json.dumps(schema)
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
