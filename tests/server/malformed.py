# SPDX-License-Identifier: Apache-2.0
"""Requests that no sane client sends, as hypothesis strategies."""

import base64
import io
import json
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from vllm_omni_vae.server.image_form import EditForm, ImageForm
from vllm_omni_vae.server.video_form import RemixForm, VideoForm

from .asgi import Sent

VIDEO_BODIES = ("/v1/videos", "/v1/videos", "/v1/videos/sync", "/v1/videos/KNOWN/remix")
IMAGE_BODIES = ("/v1/images/generations", "/v1/images/edits")
NAMES = sorted({name for form in (VideoForm, RemixForm, ImageForm, EditForm) for name in form.model_fields})
BOUNDARY = b"x"

Draw = Callable[..., Any]

SELDOM = st.sampled_from([False] * 11 + [True])
MOSTLY = st.sampled_from([True] * 3 + [False])
DAMAGE = st.sampled_from([9] * 6 + [0, 1, 2, 3])


WORDS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "\x00",
            "\ud800",
            "\udfff\ud800",
            "\r\n",
            "NaN",
            "null",
            "[]",
            "{",
            "'",
            "../..",
            "%00",
            "\u202e",
            "9" * 40,
        ]
    ),
    st.text(st.characters(exclude_categories=()), max_size=20),
    st.builds(lambda text, times: text * times, st.text(max_size=3), st.sampled_from([0, 10, 40_000])),
)
"""Text of every kind, halves of surrogate pairs and control characters too."""

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 16, 63, 64, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400)]),
    st.integers(),
    st.floats(),
    st.booleans(),
)
"""Numbers of every size, and some that JSON does not have."""

SANE: list[Any] = [
    *("64x48", "48x64", "4", "0.3", 16, 5, 9, "png", "webp", "auto"),
    {"image_url": "data:image/png;base64,AAAA"},
]


def nested(depth: int) -> Any:
    """Arrays in one another."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


KEYS = st.sampled_from(NAMES) | WORDS
LEAVES = st.one_of(st.none(), NUMBERS, WORDS, st.sampled_from(SANE))
VALUES = st.one_of(
    LEAVES,
    st.lists(LEAVES, max_size=3),
    st.dictionaries(KEYS, LEAVES, max_size=3),
    st.dictionaries(KEYS, st.lists(LEAVES, max_size=2), max_size=2),
    st.sampled_from([1, 10, 31, 32, 33, 400]).map(nested),
)
"""JSON of any kind, and some that is none."""


FIELDS = st.dictionaries(KEYS, VALUES, max_size=5)


@st.composite
def json_bodies(draw: Draw, targets: tuple[str, ...]) -> Sent:
    """A body of JSON, whole or damaged, under a type that may be another."""
    fields = draw(FIELDS)
    if draw(MOSTLY):
        fields["prompt"] = "a cat"
    value = draw(VALUES) if draw(SELDOM) else fields
    body = json.dumps(value).encode(draw(st.sampled_from([*["utf-8"] * 12, "utf-16", "utf-32", "utf-7"])))
    damage = draw(DAMAGE)
    if damage == 0:
        body = draw(mutations(body))
    elif damage == 1:
        body = b"[" * draw(st.integers(1, 100_000))
    elif damage == 2:
        body = b'{"prompt": "a cat", "seed": ' + b"9" * draw(st.integers(1, 9_000)) + b"}"
    elif damage == 3:
        body = b'{"prompt": "a", "prompt": "b", "seed": 1, "seed": ' + json.dumps(draw(VALUES)).encode() + b"}"
    kind = draw(st.sampled_from([b"application/json"] * 60 + ODD_TYPES))
    return _post(draw, targets, ((b"content-type", kind),), body)


ODD_TYPES = [
    b"",
    b";",
    b"application/json; charset=utf-16",
    b"application/problem+json",
    b"text/plain",
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
    b"multipart/form-data; boundary=" + b"y" * 300,
    b'multipart/form-data; boundary="\xff"',
    b"multipart/form-data; boundary*=utf-8''%00",
    b"multipart/mixed; boundary=x",
    b"application/x-www-form-urlencoded; charset=undefined",
    b"application/x-www-form-urlencoded",
    b"\xff\xfe",
]
CHARSETS = [
    b"utf-8",
    b"undefined",
    b"idna",
    b"punycode",
    b"zlib",
    b"utf-16",
    b"utf-8\x00",
    b"\xff",
    b"latin-1",
    b'"',
] + [b""] * 40


@st.composite
def forms(draw: Draw, targets: tuple[str, ...]) -> Sent:
    """A form, of parts that are well or ill made."""
    parts = [draw(PART) for _ in range(draw(st.integers(0, 5)))]
    if draw(MOSTLY):
        parts.append(b'Content-Disposition: form-data; name="prompt"\r\n\r\na cat')
    body = b"".join(b"--" + BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + BOUNDARY + b"--\r\n"
    damage = draw(DAMAGE)
    if damage == 0:
        body = draw(mutations(body))
    elif damage == 1:
        body = body[: draw(st.integers(0, len(body)))]
    elif damage == 2:
        body = b"\r\n" * 3 + body + b"epilogue"
    elif damage == 3:
        body = body.replace(b"\r\n", b"\n")
    kind = b"multipart/form-data; boundary=" + BOUNDARY
    charset = draw(st.sampled_from(CHARSETS))
    if charset:
        kind += b"; charset=" + charset
    if draw(SELDOM):
        kind = draw(st.sampled_from(ODD_TYPES))
    return _post(draw, targets, ((b"content-type", kind),), body)


@st.composite
def _part(draw: Draw) -> bytes:
    name = draw(KEYS)
    brackets = draw(st.sampled_from(["", "", "[]", "[image_url]", "[a][b]", "[", "]", "[[", "[a]" * 40, "[]" * 3]))
    head = f'Content-Disposition: form-data; name="{name}{brackets}"'.encode("utf-8", "surrogatepass")
    if not draw(MOSTLY):
        names = ["f.png", "", "../../etc/passwd", "a\r\nX-Y: z", "\x00", 'a"b', "é", "C:\\a", "a" * 5000]
        head += f'; filename="{draw(st.sampled_from(names))}"'.encode()
    more = [b"", b"", b"\r\nContent-Type: image/png", b"\r\nContent-Transfer-Encoding: base64", b"\r\nX", b"\r\n: y"]
    value = draw(CONTENT)
    return head + draw(st.sampled_from(more)) + b"\r\n\r\n" + value


PART = _part()


def _as_text(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def _files() -> list[bytes]:
    """Small files of each kind that there is a reader or a temptation for."""
    image = Image.effect_noise((24, 16), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    made = []
    for kind, options in (
        ("PNG", {"exif": exif}),
        ("JPEG", {"exif": exif}),
        ("WEBP", {"exif": exif}),
        ("WEBP", {"save_all": True, "append_images": [image.rotate(90)], "lossless": True}),
        ("PNG", {"save_all": True, "append_images": [image.rotate(180)]}),
        ("GIF", {"save_all": True, "append_images": [image] * 3}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw", "save_all": True, "append_images": [image]}),
        ("BMP", {}),
        ("PPM", {}),
        ("ICO", {}),
        ("PDF", {}),
    ):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        made.append(buffer.getvalue())
    for kind, size in (("PNG", (9000, 9000)), ("GIF", (1000, 1000)), ("WEBP", (4000, 4000))):
        buffer = io.BytesIO()
        Image.new("L", size).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
        made.append(buffer.getvalue())
    made.append(struct.pack(">I4s4sI4s4s", 24, b"ftyp", b"heic", 0, b"mif1", b"heic") + bytes(64))
    made.append(struct.pack(">I4s4sI4s4s", 24, b"ftyp", b"isom", 512, b"isom", b"avc1") + b"\0\0\0\x08free" + bytes(64))
    made.append(b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>')
    made.append(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9999 9999\n")
    return made


FILES = _files()


CONTENT = st.one_of(VALUES.map(_as_text), st.binary(max_size=40), st.sampled_from(FILES))


def mutations(data: bytes) -> st.SearchStrategy[bytes]:
    """``data`` with some bytes changed, a piece cut out, or its end."""
    changes = st.lists(st.tuples(st.integers(0, max(0, len(data) - 1)), st.integers(0, 255)), max_size=8)
    large = st.sampled_from([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x00\x01\x00\x00"])
    place = st.integers(0, len(data))
    return st.one_of(
        st.just(data),
        changes.map(lambda change: _changed(data, change)),
        place.map(lambda end: data[:end]),
        st.tuples(place, place).map(lambda cut: data[: min(cut)] + data[max(cut) :]),
        st.tuples(place, large).map(lambda put: data[: put[0]] + put[1] + data[put[0] + 4 :]),
    )


def _changed(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    copy = bytearray(data)
    for place, value in changes:
        if place < len(copy):
            copy[place] = value
    return bytes(copy)


@st.composite
def pictures(draw: Draw, targets: tuple[str, ...]) -> Sent:
    """Damaged files as reference images and masks: as files and as data URLs."""
    data = draw(st.sampled_from(FILES).flatmap(mutations))
    target = draw(st.sampled_from([target for target in targets if "remix" not in target]))
    fields = ["image", "mask", "mask_image", "images"] if "images" in target else ["input_reference", "image_reference"]
    name = draw(st.sampled_from(fields))
    named = [(name, data)]
    if name.startswith("mask"):
        named.append(("image", draw(st.sampled_from(FILES[:3]))))
    if draw(st.booleans()):
        head = b'Content-Disposition: form-data; name="%b"; filename="f"\r\n\r\n'
        parts = [head % field.encode() + content for field, content in named]
        parts.append(b'Content-Disposition: form-data; name="prompt"\r\n\r\na cat')
        body = b"".join(b"--" + BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + BOUNDARY + b"--\r\n"
        return _post(draw, (target,), ((b"content-type", b"multipart/form-data; boundary=" + BOUNDARY),), body)
    heads = [
        "data:image/png;base64,",
        "data:image/svg+xml;base64,",
        "data:;base64,",
        "data:image/png,",
        "http://localhost/",
    ]
    urls = {}
    for field, content in named:
        text = base64.b64encode(content).decode()
        urls[field] = draw(st.sampled_from(heads * 2 + ["data:" + "a" * 300 + "/b;base64,"])) + text
    if draw(SELDOM):
        urls[name] = draw(
            st.sampled_from([urls[name][:-1], urls[name] + "!", urls[name].replace("A", "\u00e9"), "data:"])
        )
    body = json.dumps({"prompt": "a cat", **urls}).encode()
    return _post(draw, (target,), ((b"content-type", b"application/json"),), body)


ROUTES = (
    *("/", "/static/KNOWN", "/static/../app.py", "/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"),
    *("/v1/models", "/v1/videos", "/v1/videos/sync", "/v1/videos/edits", "/v1/videos/extensions"),
    *("/v1/videos/characters", "/v1/videos/characters/KNOWN", "/v1/videos/KNOWN", *["/v1/videos/KNOWN/content"] * 8),
    *("/v1/videos/KNOWN/remix", "/v1/videos/KNOWN/events", "/v1/images/generations", "/v1/images/edits"),
    *("/v1/images/variations", "/v1/images/KNOWN", "/v1/videos/KNOWN/nothing", "/nowhere"),
)
IDS = (
    *(
        "KNOWN",
        "KNOWN",
        "KNOWN",
        "video_0",
        "video_" + "0" * 32,
        ".",
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%00",
        "%ff",
    ),
    *(
        "%0d%0aX-Y:z",
        "*",
        "~",
        "a" * 9000,
        "jobs.sqlite3",
        "jobs.lock",
        "..%5c",
        "%252e%252e%252f",
        "\u202e",
        "video_%F0",
    ),
)
METHODS = (
    *["GET"] * 12,
    *["POST"] * 4,
    "HEAD",
    "DELETE",
    "PUT",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "BREW",
    "get",
    "",
)
QUERIES = (
    *("", "", "limit=0", "limit=-1", "limit=1e9", "limit=nan", "limit=" + "9" * 5000, "limit=1&limit=2", "order=up"),
    *("after=", "after=%00", "after=KNOWN", "after=" + "a" * 5000, "variant=", "variant=thumbnail", "variant=../x"),
    *("variant=spritesheet&variant=video", "%", "%ff=%fe", "&&&=&", "a[b]=c", "order=asc&limit=100&after=video_0"),
)
HEADERS = (
    *(
        (b"range", value)
        for value in (b"bytes=0-", b"bytes=-0", b"bytes=-1", b"bytes=5-2", b"bytes=9999999-", b"x=1-2")
    ),
    *((b"range", b"bytes=" + b"0-1," * count + b"0-1") for count in (1, 50, 5000)),
    *((b"range", value) for value in (b"bytes=", b"bytes=0-" + b"9" * 5000, b"bytes=\xff", b"bytes=0-0,-1")),
    *((b"if-range", value) for value in (b"x", b"\xff", b"Wed, 99 Xyz 9999 99:99:99 GMT")),
    *((b"if-none-match", value) for value in (b"*", b'W/"x"', b"\xff")),
    *((b"if-modified-since", value) for value in (b"never", b"Thu, 01 Jan 1970 00:00:00 GMT")),
    *((b"content-length", value) for value in (b"-1", b"x", b"1e9", b"9" * 30, b"\xb2", b"")),
    *((b"accept", value) for value in (b"application/openmetrics-text; version=9.9", b"\xff", b"*/*;q=x", b",;=")),
    *((b"x-request-id", value) for value in (b"a\r\nSet-Cookie: b=c", b"\xff", b"a" * 9000, b"")),
    *((b"authorization", value) for value in (b"Bearer", b"Bearer \xff", b"Basic " + b"a" * 9000)),
    *((b"origin", value) for value in (b"null", b"https://a.example", b"\xff")),
    *((b"transfer-encoding", b"chunked"), (b"content-encoding", b"gzip"), (b"expect", b"100-continue")),
    *((b"cookie", b"a=b; c"), (b"x-forwarded-for", b"\xff"), (b"access-control-request-method", b"POST")),
    *((b"host", b"a\xff"), (b"upgrade", b"websocket"), (b"last-event-id", b"\xff")),
)


@st.composite
def requests(draw: Draw) -> Sent:
    """Any method on any route, with ids, queries and headers that are none."""
    target = draw(st.sampled_from(ROUTES)).replace("KNOWN", draw(st.sampled_from(IDS)))
    query = draw(st.sampled_from(QUERIES))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=4))
    body = draw(st.sampled_from([b"", b"", b"{}", b"x" * 100]))
    return Sent(draw(st.sampled_from(METHODS)), f"{target}?{query}" if query else target, tuple(headers), (body,))


@st.composite
def downloads(draw: Draw) -> Sent:
    """The files of a clip that there is, in ranges and under conditions that are well or ill made."""
    query = draw(st.sampled_from(["", "", "?variant=thumbnail", "?variant=spritesheet"]))
    headers = tuple(draw(st.lists(st.sampled_from(HEADERS[:20]), min_size=1, max_size=3)))
    return Sent("GET", f"/v1/videos/KNOWN/content{query}", headers)


@st.composite
def noise(draw: Draw, targets: tuple[str, ...]) -> Sent:
    """Any bytes, in any pieces, up to the end or not, under any type; some of more bytes than a body may have."""
    body = draw(st.binary(max_size=200)) * draw(st.sampled_from([1, 1, 1, 1, 1, 10, 40_000]))
    kind = draw(st.sampled_from([*[b"application/json", b"multipart/form-data; boundary=x"] * 6, *ODD_TYPES]))
    return _post(draw, targets, ((b"content-type", kind),), body)


def _post(draw: Draw, targets: tuple[str, ...], headers: tuple[tuple[bytes, bytes], ...], body: bytes) -> Sent:
    """POST ``body`` whole or in pieces; now and then the client goes away in the middle."""
    cut = sorted(draw(st.lists(st.integers(0, len(body)), max_size=2)))
    pieces = tuple(body[start:end] for start, end in zip([0, *cut], [*cut, len(body)], strict=True))
    complete = not draw(SELDOM)
    return Sent("POST", draw(st.sampled_from(targets)), headers, pieces if complete else pieces[:-1], complete)
