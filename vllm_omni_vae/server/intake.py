# SPDX-License-Identifier: Apache-2.0
"""From a request's body to a clip that the engine can make exactly, or to the reason why not."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from starlette.requests import Request

from ..config import ServerConfig
from ..errors import RequestError
from ..pipelines.request import Frames, GenerationRequest
from .body import read_fields
from .forms import RemixForm, VideoForm, nearest_frames, validate
from .lifecycle import ServingEngine
from .reference import fit_reference, load_reference


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


class Intake:
    """Reads and checks what clients ask for.

    Args:
        engine: Fills in the model's defaults and refuses what the model cannot make.
        names: Names under which the model answers; the first is used where a request gives none.
        config: Limits on bodies, pixels and frames.
    """

    def __init__(self, engine: ServingEngine, names: tuple[str, ...], config: ServerConfig) -> None:
        self._engine = engine
        self._names = names
        self._config = config

    async def video(self, request: Request) -> Order:
        """Read a `VideoForm`.

        Raises:
            RequestError: anything in it that cannot be done, with the field's name.
        """
        form = validate(VideoForm, await read_fields(request, max_bytes=self._config.max_upload_bytes))
        model = self._model(form.model)
        asked, source, fit = form.to_request(), form.reference(), form.reference_fit()
        if source is None:
            resolved = self._resolve(asked, form)
        else:
            image = await asyncio.to_thread(load_reference, source, max_pixels=self._config.max_pixels)
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
        form = validate(RemixForm, await read_fields(request, max_bytes=self._config.max_upload_bytes))
        images: tuple[Frames, ...] = ()
        if await asyncio.to_thread(reference.exists):
            data = await asyncio.to_thread(reference.read_bytes)
            images = (await asyncio.to_thread(load_reference, data, max_pixels=self._config.max_pixels),)
        return self._engine.resolve(dataclasses.replace(source, prompt=form.prompt, images=images))

    def _model(self, asked: str | None) -> str:
        if asked is not None and asked not in self._names:
            raise RequestError(
                f"the model {asked!r} is not served here; served: {', '.join(self._names)}",
                param="model",
                code="model_not_found",
                status=400,
            )
        return asked or self._names[0]

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
        self._check_limits(resolved, form)
        return resolved

    def _check_limits(self, resolved: GenerationRequest, form: VideoForm) -> None:
        if (resolved.width or 0) * (resolved.height or 0) > self._config.max_pixels:
            raise RequestError(
                f"{resolved.width}x{resolved.height} are more than the {self._config.max_pixels} pixels that this "
                "server makes at most",
                param="width" if form.size is None else "size",
                code="too_large",
            )
        if (resolved.num_frames or 0) > self._config.max_frames:
            raise RequestError(
                f"{resolved.num_frames} frames are more than the {self._config.max_frames} that this server makes",
                param="num_frames" if form.seconds is None else "seconds",
                code="too_long",
            )
