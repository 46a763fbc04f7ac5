# SPDX-License-Identifier: Apache-2.0
"""The tiny LTX-2 checkpoints load, make a clip with sound, react to their inputs, and one seed makes one checkpoint."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import DiffusionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2Vocoder, LTX2VocoderWithBWE

from tests.tiny.conftest import Load, check_made_again, files
from vllm_omni_vae import tiny

CLASSES = {
    "ltx2-t2v": LTX2Pipeline,
    "ltx2-i2v": LTX2ImageToVideoPipeline,
    "ltx2.3-t2v": LTX2Pipeline,
    "ltx2.3-i2v": LTX2ImageToVideoPipeline,
    "ltx2.5-t2v": LTX2Pipeline,
    "ltx2.5-i2v": LTX2ImageToVideoPipeline,
}
MAX_BYTES = 12 * 2**20
SIDE, FRAMES, FPS = 96, 9, 24


class Made(NamedTuple):
    """Frames (1, T, H, W, 3) and sound (1, channels, n), or their latents."""

    frames: np.ndarray
    sound: np.ndarray


def generate(
    pipe: DiffusionPipeline, *, prompt: str = "a cat", colour: str = "red", output_type: str = "np", **arguments: object
) -> Made:
    if isinstance(pipe, LTX2ImageToVideoPipeline):
        arguments["image"] = PIL.Image.new("RGB", (SIDE, SIDE), colour)
    frames, sound = pipe(
        prompt=prompt,
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        frame_rate=float(FPS),
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(7),
        spatio_temporal_guidance_blocks=[1],
        output_type=output_type,
        return_dict=False,
        **arguments,
    )
    return Made(np.asarray(frames), sound.numpy())


def test_every_ltx2_family_is_listed() -> None:
    assert set(tiny._FAMILIES_BY_MODULE["ltx2"]) == set(CLASSES)


@pytest.mark.parametrize("family", CLASSES)
def test_loads_and_makes_a_clip_with_sound(family: str, checkpoints: dict[str, Path], load: Load) -> None:
    assert sum(len(content) for content in files(checkpoints[family]).values()) <= MAX_BYTES
    pipe = load(family)
    assert type(pipe) is CLASSES[family]

    made = generate(pipe)
    assert made.frames.shape == (1, FRAMES, SIDE, SIDE, 3)
    assert made.frames.std(axis=(2, 3)).min() > 0.02, "every frame and channel varies in space"
    assert np.abs(np.diff(made.frames, axis=1)).mean() > 0.005, "frames differ"
    assert ((made.frames == 0) | (made.frames == 1)).mean() < 0.25, "few values are clamped"

    seconds = made.sound.shape[2] / pipe.vocoder.config.output_sampling_rate
    assert made.sound.shape[:2] == (1, 2)
    assert abs(seconds - FRAMES / FPS) < 0.06
    assert made.sound.std(axis=2).min() > 0.005, "both channels are heard"
    assert np.abs(made.sound).max() < 0.999, "no sample is cut"
    assert np.isfinite(made.frames).all() and np.isfinite(made.sound).all()

    again = generate(pipe)
    np.testing.assert_array_equal(made.frames, again.frames)
    np.testing.assert_array_equal(made.sound, again.sound)


@pytest.mark.parametrize("family", CLASSES)
def test_prompt_and_image_matter(family: str, load: Load) -> None:
    pipe = load(family)
    latents = generate(pipe, output_type="latent")
    other_prompt = generate(pipe, output_type="latent", prompt="rain over a harbour at night")
    other_image = generate(pipe, output_type="latent", colour="blue")
    for one, other in zip(latents, other_prompt, strict=True):
        assert np.abs(one - other).mean() > 1e-4
    has_image = CLASSES[family] is LTX2ImageToVideoPipeline
    assert (np.abs(latents.frames - other_image.frames).mean() > 1e-3) == has_image


@pytest.mark.parametrize("family", CLASSES)
def test_the_structure_is_the_released_one(family: str, load: Load) -> None:
    pipe = load(family)
    newer, latest = not family.startswith("ltx2-"), family.startswith("ltx2.5")
    vae, denoiser, audio = pipe.vae, pipe.transformer.config, pipe.audio_vae
    assert (vae.spatial_compression_ratio, vae.temporal_compression_ratio) == (32, 8)
    assert vae.config.decoder_spatial_padding_mode == ("zeros" if newer else "reflect")
    assert audio.config.base_channels == denoiser.audio_in_channels == len(audio.latents_mean)
    assert type(pipe.vocoder) is (LTX2VocoderWithBWE if newer else LTX2Vocoder)
    assert pipe.vocoder.config.output_sampling_rate == (48_000 if newer else 24_000)
    assert (denoiser.cross_attn_mod, denoiser.perturbed_attn) == (newer, newer)
    assert pipe.connectors.config.per_modality_projections == newer
    assert (denoiser.ff_bias, denoiser.use_keyframes_abs_pos_embedding) == (not latest, latest)
    assert pipe.text_encoder.config.model_type == ("gemma4_unified" if latest else "gemma3")
    assert (pipe.duration_head is not None) == latest
    schedule = pipe.scheduler.config
    assert (schedule.use_dynamic_shifting, schedule.shift_terminal) == ((False, None) if latest else (True, 0.1))
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, 3, 9, 96, 64)).latent_dist.mode()
        assert latents.shape == (1, vae.config.latent_channels, 2, 3, 2)
        assert vae.decode(latents).sample.shape == (1, 3, 9, 96, 64)


@pytest.mark.parametrize("family", CLASSES)
def test_same_seed_same_bytes(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check_made_again(family, checkpoints[family], tmp_path / family)
