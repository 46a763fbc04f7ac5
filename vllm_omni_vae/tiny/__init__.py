# SPDX-License-Identifier: Apache-2.0
"""Tiny offline checkpoints: real structure, random weights, a few MiB.

Importing this package imports neither torch nor diffusers; :func:`build` does. A new family takes one file with a
``pipeline(family, generator)`` function and its lines in ``_FAMILIES_BY_MODULE``.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from vllm_omni_vae.errors import ConfigurationError

_FAMILIES_BY_MODULE: Mapping[str, Mapping[str, str]] = {
    "wan": {
        "wan2.1-t2v": "Wan 2.1 text to video: one transformer, 8x VAE",
        "wan2.1-i2v": "Wan 2.1 image to video: one transformer, CLIP image encoder, 8x VAE",
        "wan2.2-t2v": "Wan 2.2 A14B text to video: two experts (boundary 0.875), 8x VAE",
        "wan2.2-i2v": "Wan 2.2 A14B image to video: two experts (boundary 0.9), 8x VAE",
        "wan2.2-ti2v-5b": "Wan 2.2 TI2V-5B text or image to video: one transformer, patchified residual 16x VAE",
    },
    "ltx2": {
        "ltx2-t2v": "LTX-2.0 text to video with sound: 32x VAE that pads by reflection, 24 kHz vocoder",
        "ltx2-i2v": "LTX-2.0 image to video with sound: 32x VAE that pads by reflection, 24 kHz vocoder",
        "ltx2.3-t2v": "LTX-2.3 text to video with sound: 32x VAE, vocoder with bandwidth extension to 48 kHz",
        "ltx2.3-i2v": "LTX-2.3 image to video with sound: 32x VAE, vocoder with bandwidth extension to 48 kHz",
        "ltx2.5-t2v": "LTX-2.5 text to video with sound: distilled denoiser, Gemma 4, duration head, else as LTX-2.3",
        "ltx2.5-i2v": "LTX-2.5 image to video with sound: distilled denoiser, Gemma 4, duration head, else as LTX-2.3",
    },
    "ltx2_two_stage": {
        "ltx2-two-stage": "LTX-2.0 text or image to video with sound in two stages: with the upsampler of latents",
    },
    "qwen_image": {
        "qwen-image": "Qwen-Image text to image: 8x VAE",
        "qwen-image-edit": "Qwen-Image-Edit, one image and text to image: 8x VAE",
        "qwen-image-edit-plus": "Qwen-Image-Edit-Plus, several images and text to image: 8x VAE",
        "qwen-image-layered": "Qwen-Image-Layered, image to layers with transparency: 8x VAE with four channels",
    },
    "z_image": {
        "z-image": "Z-Image text to image: 8x VAE (AutoencoderKL)",
    },
    "flux2": {
        "flux2": "FLUX.2 [dev] text and images to image: Mistral 3, 8x VAE with latents in 2x2 patches",
        "flux2-klein": "FLUX.2 [klein] text and images to image: Qwen3, 8x VAE with latents in 2x2 patches",
    },
}

FAMILIES: Mapping[str, str] = {
    family: description for group in _FAMILIES_BY_MODULE.values() for family, description in group.items()
}
"""Family name to a one-line description, in the order to show them."""

_MODULE_OF = {family: module for module, group in _FAMILIES_BY_MODULE.items() for family in group}
_MARKER = "tiny_checkpoint.json"


def build(family: str, out: Path, *, seed: int = 0) -> Path:
    """Write the tiny checkpoint of ``family`` into the folder ``out`` and return ``out``.

    The result loads with ``DiffusionPipeline.from_pretrained(out)`` and needs no network. Its files are byte-identical
    for the same family, seed and library versions; the global random state is left as it was. ``out`` is created with
    its parents. An earlier checkpoint of the same family there is overwritten; nothing is deleted.

    Raises:
        ConfigurationError: the family is unknown or needs a package that is not installed, ``out`` is a file, or it
            holds anything else. Nothing is written.
    """
    if family not in FAMILIES:
        raise ConfigurationError(
            f"tiny checkpoint family {family!r} was asked for, but only {', '.join(FAMILIES)} exist; choose one of them"
        )
    out = Path(out)
    _check_free(out, family)

    import torch

    module = import_module(f"{__name__}.{_MODULE_OF[family]}")
    with torch.random.fork_rng(devices=[]):
        pipeline = module.pipeline(family, torch.Generator("cpu").manual_seed(seed))
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).write_text(json.dumps({"family": family, "seed": seed}) + "\n")
    pipeline.save_pretrained(out)
    return out


def _check_free(out: Path, family: str) -> None:
    found = _occupant(out)
    if found not in (None, family):
        raise ConfigurationError(
            f"a tiny {family} checkpoint was to be written to {out}, but that is {found}; "
            "name a new or empty folder, or remove this one first"
        )


def _occupant(out: Path) -> str | None:
    """What lies at ``out``: ``None`` if it is free, the family's name for a tiny checkpoint, else a description."""
    if not out.exists():
        return None
    if not out.is_dir():
        return "a file"
    if not any(out.iterdir()):
        return None
    marker = out / _MARKER
    if not marker.is_file():
        return "a folder with other files in it"
    try:
        return str(json.loads(marker.read_text())["family"])
    except (ValueError, KeyError, TypeError):
        return f"a folder with an unreadable {_MARKER}"
