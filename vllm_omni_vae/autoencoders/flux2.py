# SPDX-License-Identifier: Apache-2.0
"""FLUX.2: as AutoencoderKL, with statistics of latents that its pipelines use and encode and decode do not."""

from __future__ import annotations

from diffusers import AutoencoderKLFlux2

from .kl import DistributedKlMixin, KlSpec


class KlFlux2Spec(KlSpec):
    """Latents as the autoencoder has them, before the pipeline folds 2x2 of them into channels."""

    name = "AutoencoderKLFlux2"

    @property
    def base_class(self) -> type:
        return AutoencoderKLFlux2


class DistributedAutoencoderKLFlux2(DistributedKlMixin, AutoencoderKLFlux2):
    """`diffusers.AutoencoderKLFlux2` whose tiles are shared among ranks; weights and state-dict keys are the same."""

    spec = KlFlux2Spec()
