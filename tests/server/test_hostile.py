# SPDX-License-Identifier: Apache-2.0
"""What hostile requests gave rise to before, one by one; tests/server/test_fuzz.py looks for more of the kind."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.server.app import create_app
from vllm_omni_vae.server.body import MAX_FIELDS
from vllm_omni_vae.server.errors import MAX_TEXT
from vllm_omni_vae.server.fields import MAX_EXTRA

from .asgi import Answer, Application, Sent, running
from .scripted_engine import ScriptedEngine

FORM = b"multipart/form-data; boundary=x"
JSON = b"application/json"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    config = ServerConfig(media_storage_path=str(tmp_path_factory.mktemp("media")))
    with running(create_app(ScriptedEngine(), config, model_name="m")) as app:
        yield app


def post(app: Application, kind: bytes, *body: bytes, complete: bool = True) -> Answer:
    return app.send(Sent("POST", "/v1/videos", ((b"content-type", kind),), body, complete))


def error(answer: Answer) -> tuple[int | None, str, str | None]:
    told = answer.json()["error"]
    return answer.status, told["code"], told["param"]


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more, value)


@pytest.mark.parametrize(
    "charset", [b"undefined", b"idna", b"punycode", b"zlib", b"utf-16", b"utf-8\x00", b"\xff", b'""']
)
def test_a_form_in_an_odd_charset(app: Application, charset: bytes) -> None:
    answer = post(app, FORM + b"; charset=" + charset, part("prompt", b"\xff"), b"--x--\r\n")
    assert error(answer) == (415, "unsupported_media_type", None)


@pytest.mark.parametrize("charset", [b"utf-8", b"UTF-8", b"us-ascii", b"iso-8859-1"])
def test_a_form_in_a_usual_charset(app: Application, charset: bytes) -> None:
    answer = post(app, FORM + b"; charset=" + charset, part("prompt", b"a cat"), b"--x--\r\n")
    assert answer.status == 200


def test_fields_in_many_brackets(app: Application) -> None:
    answer = post(app, b"application/x-www-form-urlencoded", b"a" + b"[b]" * 500_000 + b"=1")
    assert error(answer) == (400, "invalid_parameter", None)


def test_a_file_among_the_extra_params(app: Application) -> None:
    body = part("prompt", b"a cat") + part("extra_params[shift]", b"x", b'; filename="f"') + b"--x--\r\n"
    assert error(post(app, FORM, body)) == (422, "invalid_value", "extra_params")


def test_large_extra_params(app: Application) -> None:
    for length, status in ((MAX_EXTRA - 100, 200), (MAX_EXTRA, 422)):
        body = {"prompt": "a cat", "extra_params": {"shift": "x" * length}}
        assert app.ask("POST", "/v1/videos", body).status == status


def test_many_fields_and_long_names_are_not_told_back(app: Application) -> None:
    many = {f"k{number}": 1 for number in range(MAX_FIELDS + 1)}
    assert error(app.ask("POST", "/v1/videos", many)) == (400, "invalid_json", None)
    for body in ({"x" * 1_000_000: 1}, {"prompt": "a", "model": "x" * 1_000_000}, dict(list(many.items())[1:])):
        answer = app.ask("POST", "/v1/videos", body)
        assert answer.status in (400, 422)
        assert len(answer.body) <= 2 * MAX_TEXT + 300


def test_numbers_that_json_does_not_have(app: Application) -> None:
    for text in (b"NaN", b"Infinity", b"-Infinity"):
        answer = post(app, JSON, b'{"prompt": "a cat", "extra_params": {"shift": ' + text + b"}}")
        assert error(answer) == (400, "invalid_json", None)
        form = part("prompt", b"a cat") + part("extra_params", b'{"shift": ' + text + b"}") + b"--x--\r\n"
        assert error(post(app, FORM, form)) == (422, "invalid_value", "extra_params")


def test_a_client_that_goes_away_is_no_fault_of_the_server(app: Application, caplog: pytest.LogCaptureFixture) -> None:
    for kind, body in ((JSON, b'{"prompt": '), (FORM, part("prompt", b"a"))):
        assert post(app, kind, body, complete=False).status == 499
    assert caplog.records == []


@pytest.mark.parametrize("head", [";a=b" * 1_000_000, "x" * 4_000_000, "/x" * 1_000_000])
def test_a_data_url_that_does_not_begin(app: Application, head: str) -> None:
    body = json.dumps({"prompt": "a cat", "image_reference": f"data:image/png{head};base64,AAAA"}).encode()
    assert error(post(app, JSON, body)) == (400, "invalid_data_url", "image_reference")


def test_an_error_does_not_say_where_in_memory_something_is(app: Application) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
    answer = app.ask("POST", "/v1/videos", {"prompt": "a cat", "image_reference": url})
    assert error(answer) == (400, "invalid_image", "image_reference")
    assert b"0x" not in answer.body


@pytest.mark.parametrize("first", ["0", "9" * 5000, ""])
def test_a_range_of_many_digits_is_none(app: Application, first: str) -> None:
    job = app.ask("POST", "/v1/videos", {"prompt": "a cat"}).json()
    while app.ask("GET", f"/v1/videos/{job['id']}").json()["status"] != "completed":
        pass
    header = (b"range", f"bytes={first}-{'9' * 5000}".encode())
    answer = app.send(Sent("GET", f"/v1/videos/{job['id']}/content", (header,)))
    assert answer.status == 200
    assert answer.body[4:8] == b"ftyp"


@pytest.mark.parametrize(
    "identity",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "..%5c..",
        "%00",
        "jobs.sqlite3",
        "video_..",
        "*",
        "video_" + "0" * 32,
        "%ff",
    ],
)
@pytest.mark.parametrize("tail", ["", "/content", "/content?variant=thumbnail", "/events", "/remix"])
def test_an_id_is_a_name_and_no_path(app: Application, identity: str, tail: str) -> None:
    body = (b'{"prompt": "a cat"}',) if tail == "/remix" else ()
    method = "POST" if body else "GET"
    answer = app.send(Sent(method, f"/v1/videos/{identity}{tail}", ((b"content-type", JSON),), body))
    assert answer.status == 404
    deleted = app.send(Sent("DELETE", f"/v1/videos/{identity}"))
    assert deleted.status in (404, 405)


def test_file_names_of_uploads_are_never_used(app: Application, png: bytes, tmp_path: Path) -> None:
    for name in (b"../../x.png", b"/etc/passwd", b"a\r\nSet-Cookie: b=c", b"\x00", b""):
        body = part("prompt", b"a cat") + part("input_reference", png, b'; filename="' + name + b'"') + b"--x--\r\n"
        answer = post(app, FORM, body)
        assert answer.status in (200, 400)
        assert not any(b"cookie" in header.lower() for header, _ in answer.headers)


def test_ids_cannot_be_guessed(app: Application) -> None:
    ids = {app.ask("POST", "/v1/videos", {"prompt": "a cat"}).json()["id"] for _ in range(8)}
    assert len(ids) == 8
    assert {len(identity) for identity in ids} == {len("video_") + 32}  # 128 bits of the system's randomness
    heads = [identity.removeprefix("video_")[:8] for identity in ids]
    assert len(set(heads)) == 8
