# SPDX-License-Identifier: Apache-2.0
"""From a request's body to images that the engine can make exactly, or to the reason why not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from starlette.requests import Request

from ..errors import RequestError
from ..pipelines.checks import check_task
from ..pipelines.request import GenerationRequest
from .image_form import REPEATED, EditForm, ImageForm
from .intake import UNREAD, Intake
from .mask import load_mask
from .pictures import WEBP_SIDE, Encoding
from .reference import load_reference


@dataclasses.dataclass(frozen=True, slots=True)
class ImageOrder:
    """Images that can be made: every value filled in, the reference images in their own size.

    Attributes:
        request: What the engine gets.
        model: The name under which they were asked for.
        encoding: How they are written.
        quality: OpenAI's word for the effort, as it was asked for; there is only one effort.
        stream: Whether the answer is a stream of events.
    """

    request: GenerationRequest
    model: str
    encoding: Encoding
    quality: str
    stream: bool


class ImageIntake(Intake):
    """Reads the bodies of the image routes."""

    async def generation(self, request: Request) -> ImageOrder:
        """Read an `ImageForm`.

        Raises:
            RequestError: anything in it that cannot be done, with the field's name.
        """
        form = await self._read(ImageForm, request)
        asked = form.to_request()
        check_task(asked, self._engine.card)
        return self._order(form, asked, {}, self._terms(form))

    async def edit(self, request: Request) -> ImageOrder:
        """Read an `EditForm`, its images and its mask.

        Raises:
            RequestError: anything in it that cannot be done, with the field's name.
        """
        form = await self._read(EditForm, request, REPEATED)
        asked, uploads, mask = form.to_request(), form.references(), form.mask_upload()
        card, max_pixels = self._engine.card, self._config.max_pixels
        names = {"image": uploads[0].param, "mask": mask.param if mask else "mask"}
        with _named(names):
            check_task(dataclasses.replace(asked, images=(UNREAD,) * len(uploads)), card)
        terms = self._terms(form)
        pictures = await self._fetcher.fetch([*uploads, *([mask] if mask else [])])
        images = []
        for upload in pictures[: len(uploads)]:
            images.append(
                await asyncio.to_thread(load_reference, upload, max_pixels=max_pixels, transparency=card.transparency)
            )
        asked = dataclasses.replace(asked, images=tuple(images))
        if mask is not None:
            height, width = images[0].shape[:2]
            marked = await asyncio.to_thread(load_mask, pictures[-1], (width, height), max_pixels=max_pixels)
            asked = dataclasses.replace(asked, mask=marked)
        return self._order(form, asked, names, terms)

    def _terms(self, form: ImageForm) -> tuple[str, Encoding]:
        return self._model(form.model), form.encoding(self._engine.card.transparency)

    def _order(
        self, form: ImageForm, asked: GenerationRequest, names: Mapping[str, str], terms: tuple[str, Encoding]
    ) -> ImageOrder:
        model, encoding = terms
        with _named({**names, "num_images": "n"}):
            resolved = self._engine.resolve(asked)
        self._check_pixels(resolved, None if form.size == "auto" else form.size)
        count = resolved.runs * (resolved.pictures or 1)
        if count > self._config.max_frames:
            raise RequestError(
                f"{count} pictures are more than the {self._config.max_frames} that this server makes",
                param="layers" if form.n is None else "n",
                code="too_large",
            )
        if encoding.format == "webp" and max(resolved.width or 0, resolved.height or 0) > WEBP_SIDE:
            raise RequestError(
                f"a webp file has at most {WEBP_SIDE} pixels a side, not {resolved.width}x{resolved.height}; use png",
                param="output_format",
                code="too_large",
            )
        return ImageOrder(resolved, model, encoding, form.quality, form.stream)


@contextlib.contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Let an error name a field as the client did."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise
