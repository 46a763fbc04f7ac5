# SPDX-License-Identifier: Apache-2.0
"""Which of diffusers' other autoencoders a spatial shard does exactly, and why it does not do the rest."""

from __future__ import annotations

import dataclasses

from .spec import Operation


@dataclasses.dataclass(frozen=True, slots=True)
class UntiledClass:
    """One class of diffusers that has no family file. What is said here is proven by ``test_other_vaes.py``.

    Attributes:
        name: The class.
        encode, decode: Why the operation cannot be a shard; empty where it is exact.
        without: A kind of module with which neither is exact; empty for none.
        reset: Method that drops what a failed call left on the module; empty where each call does that first.
    """

    name: str
    encode: str = ""
    decode: str = ""
    without: str = ""
    reset: str = ""

    def refusal(self, operation: Operation) -> str:
        """Why ``operation`` cannot be a shard; empty where it is exact."""
        return self.encode if operation is Operation.ENCODE else self.decode


_NO_WHOLE = "diffusers has no un-tiled path for it"

CLASSES: tuple[UntiledClass, ...] = (
    UntiledClass("AsymmetricAutoencoderKL"),
    UntiledClass("AutoencoderDC", without="SanaMultiscaleLinearAttention"),
    UntiledClass("AutoencoderKLAllegro", encode=_NO_WHOLE, decode=_NO_WHOLE),
    UntiledClass("AutoencoderKLCogVideoX"),
    UntiledClass("AutoencoderKLCosmos"),
    UntiledClass("AutoencoderKLHunyuanImage"),
    UntiledClass("AutoencoderKLHunyuanImageRefiner"),
    UntiledClass("AutoencoderKLHunyuanVideo"),
    UntiledClass("AutoencoderKLHunyuanVideo15"),
    UntiledClass("AutoencoderKLKVAE"),
    UntiledClass("AutoencoderKLKVAEVideo"),
    UntiledClass("AutoencoderKLLTXVideo"),
    UntiledClass("AutoencoderKLMagvit", reset="_clear_conv_cache"),
    UntiledClass("AutoencoderKLMiniMaxH3", decode="its decoder is a transformer that numbers the positions"),
    UntiledClass("AutoencoderKLMochi"),
    UntiledClass("AutoencoderKLTemporalDecoder"),
    UntiledClass("AutoencoderTiny"),
    UntiledClass("AutoencoderVidTok"),
    UntiledClass("Kandinsky6SRVAE"),
    UntiledClass("VQModel", decode="its commitment loss is a mean over the whole map"),
)
"""Every class there is a line for, by name."""
