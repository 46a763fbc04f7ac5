# SPDX-License-Identifier: Apache-2.0
"""The offline way in: the same engine and ranks as the server's, without HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import DiffusionParallelConfig, EngineConfig
from ..config.flags import flags, pick
from ..config.vae import VaeConfig
from ..errors import ConfigurationError, RequestError
from ..pipelines.request import Frames, GenerationRequest, GenerationResult
from .engine import Engine


class Omni:
    """A model on its ranks, ready to generate. Ends them with `close` or at the end of a ``with`` block.

    Ranks are processes that do not import the caller's module, so no ``if __name__ == "__main__"`` is needed.

    Examples:
        >>> with Omni(model="ckpt", parallel_config=DiffusionParallelConfig(vae_patch_parallel_size=2)) as omni:
        ...     clip = omni.generate("a boat on a calm lake", width=96, height=96, num_frames=9)  # doctest: +SKIP

    Args:
        model: Folder or hub name of a diffusers checkpoint.
        parallel_config: How ranks divide the work.
        settings: Any field of `EngineConfig` or `VaeConfig`, e.g. ``vae_use_tiling=True`` or ``dtype="bfloat16"``.

    Raises:
        ConfigurationError: an unknown setting, or something that this model cannot do.
        EngineError: the ranks did not start.
    """

    def __init__(self, model: str, parallel_config: DiffusionParallelConfig | None = None, **settings: Any):
        known = {flag.name for flag in flags((EngineConfig, VaeConfig))}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigurationError(f"Omni has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        self._engine = Engine(
            pick(
                EngineConfig,
                settings,
                model=model,
                parallel=parallel_config or DiffusionParallelConfig(),
                vae=pick(VaeConfig, settings),
            )
        )
        self._ids = itertools.count(1)
        try:
            self._engine.start()
        except BaseException:
            self._engine.close()
            raise

    def generate(
        self, prompt: str, *, image: Any = None, images: Sequence[Any] = (), **fields: Any
    ) -> GenerationResult:
        """Make one clip, or the images of an image model, and wait for it.

        Args:
            prompt: What to show.
            image: Reference picture: a PIL image or ``(H, W, 3)`` uint8 pixels; of a clip's size, for a clip. A model
                that takes transparency gets ``(H, W, 4)``.
            images: Several reference pictures, where the model takes more than one.
            fields: Any other field of `GenerationRequest`, e.g. ``width``, ``num_frames``, ``num_images``, ``seed``.

        Returns:
            Frames or images, seed, seconds per stage and the VAE's decisions. With ``external_launcher`` rank 0 alone
            has them; elsewhere ``frames`` is empty.

        Raises:
            RequestError: the model cannot make it exactly.
            EngineError: a rank failed; the next call works again.
        """
        if image is not None and images:
            raise RequestError("image and images were both given; give one of them", param="image", status=400)
        card = self._engine.card
        given = [image] if image is not None else images
        pictures = tuple(_pixels(picture, transparency=card.transparency) for picture in given)
        request = self._engine.resolve(GenerationRequest(prompt=prompt, medium=card.medium, images=pictures, **fields))
        return self._engine.submit(request, job_id=f"offline-{next(self._ids)}").future.result()

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pixels(picture: Any, *, transparency: bool) -> Frames:
    pixels = np.asarray(picture.convert("RGBA" if transparency else "RGB") if hasattr(picture, "convert") else picture)
    channels = 4 if transparency else 3
    if pixels.ndim != 3 or pixels.shape[2] != channels or pixels.dtype != np.uint8:
        raise RequestError(
            f"a picture must be (H, W, {channels}) uint8 pixels, not {pixels.shape} {pixels.dtype}", param="image"
        )
    return pixels
