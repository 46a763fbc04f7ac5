# SPDX-License-Identifier: Apache-2.0
"""What reading a request for a video and reading one for images have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np
from pydantic import BaseModel
from starlette.requests import Request

from ..config import ServerConfig
from ..errors import RequestError
from ..pipelines.request import GenerationRequest
from .body import read_fields
from .fetch import ImageFetcher
from .fields import validate
from .lifecycle import ServingEngine

Form = TypeVar("Form", bound=BaseModel)

UNREAD = np.zeros((1, 1, 3), np.uint8)
"""Stands for an image in a check of the task, which comes before the image is fetched and read."""


class Intake:
    """Reads and checks what clients ask for.

    Args:
        engine: Fills in the model's defaults and refuses what the model cannot make.
        names: Names under which the model answers; the first is used where a request gives none.
        config: Limits on bodies, pixels and frames.
        fetcher: Gets pictures that are addresses.
    """

    def __init__(
        self, engine: ServingEngine, names: tuple[str, ...], config: ServerConfig, fetcher: ImageFetcher
    ) -> None:
        self._engine = engine
        self._names = names
        self._config = config
        self._fetcher = fetcher

    async def _read(self, form: type[Form], request: Request, repeated: Collection[str] = frozenset()) -> Form:
        fields = await read_fields(request, max_bytes=self._config.max_upload_bytes, repeated=repeated)
        return validate(form, fields)

    def _model(self, asked: str | None) -> str:
        if asked is not None and asked not in self._names:
            raise RequestError(
                f"the model {asked!r} is not served here; served: {', '.join(self._names)}",
                param="model",
                code="model_not_found",
                status=400,
            )
        return asked or self._names[0]

    def _check_pixels(self, resolved: GenerationRequest, size: str | None) -> None:
        if (resolved.width or 0) * (resolved.height or 0) > self._config.max_pixels:
            raise RequestError(
                f"{resolved.width}x{resolved.height} are more than the {self._config.max_pixels} pixels that this "
                "server makes at most",
                param="width" if size is None else "size",
                code="too_large",
            )
