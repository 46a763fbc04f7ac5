# SPDX-License-Identifier: Apache-2.0
"""From a request's body to a clip that the engine can make exactly, or to the reason why not."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from starlette.requests import Request

from ..errors import RequestError
from ..pipelines.checks import check_task
from ..pipelines.request import Frames, GenerationRequest
from .decode import Upload
from .intake import UNREAD, Intake
from .reference import fit_reference, load_reference
from .video_form import RemixForm, VideoForm, nearest_frames


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """A clip that can be made: every value filled in, the reference image in the clip's size.

    Attributes:
        request: What the engine gets.
        model: The name under which it was asked for.
        seconds: Its length as OpenAI's string: as it was asked for, else frames divided by fps.
    """

    request: GenerationRequest
    model: str
    seconds: str


class VideoIntake(Intake):
    """Reads the bodies of the video routes."""

    async def video(self, request: Request) -> Order:
        """Read a `VideoForm`.

        Raises:
            RequestError: anything in it that cannot be done, with the field's name.
        """
        form = await self._read(VideoForm, request)
        model = self._model(form.model)
        asked, upload, fit = form.to_request(), form.reference(), form.reference_fit()
        if upload is None:
            resolved = self._resolve(asked, form)
        else:
            check_task(dataclasses.replace(asked, images=(UNREAD,)), self._engine.card)
            (upload,) = await self._fetcher.fetch([upload])
            image = await asyncio.to_thread(load_reference, upload, max_pixels=self._config.max_pixels)
            resolved = self._resolve(dataclasses.replace(asked, images=(image,)), form)
            width, height = resolved.width or image.shape[1], resolved.height or image.shape[0]
            fitted = await asyncio.to_thread(fit_reference, image, width, height, fit)
            resolved = dataclasses.replace(resolved, images=(fitted,))
        seconds = form.seconds or f"{(resolved.num_frames or 0) / (resolved.fps or 1):.6g}"
        return Order(resolved, model, seconds)

    async def remix(self, request: Request, source: GenerationRequest, reference: Path) -> GenerationRequest:
        """Read a `RemixForm` and apply it to ``source``, whose image is in the file ``reference`` if it had one.

        Raises:
            RequestError: no prompt, or more than a prompt.
        """
        form = await self._read(RemixForm, request)
        images: tuple[Frames, ...] = ()
        if await asyncio.to_thread(reference.exists):
            upload = Upload(await asyncio.to_thread(reference.read_bytes), "input_reference")
            images = (await asyncio.to_thread(load_reference, upload, max_pixels=self._config.max_pixels),)
        return self._engine.resolve(dataclasses.replace(source, prompt=form.prompt, images=images, trace=False))

    def _resolve(self, asked: GenerationRequest, form: VideoForm) -> GenerationRequest:
        resolved = self._engine.resolve(asked)
        if form.seconds is not None and resolved.fps is not None:
            frames = nearest_frames(float(form.seconds), resolved.fps, self._engine.card.temporal_ratio)
            if form.num_frames not in (None, frames):
                raise RequestError(
                    f"seconds {form.seconds} at {resolved.fps} fps are {frames} frames, but num_frames is "
                    f"{form.num_frames}; send one of the two",
                    param="seconds",
                    code="conflicting_parameters",
                    status=400,
                )
            resolved = self._engine.resolve(dataclasses.replace(resolved, num_frames=frames))
        self._check_pixels(resolved, form.size)
        if (resolved.num_frames or 0) > self._config.max_frames:
            raise RequestError(
                f"{resolved.num_frames} frames are more than the {self._config.max_frames} that this server makes",
                param="num_frames" if form.seconds is None else "seconds",
                code="too_long",
            )
        return resolved
