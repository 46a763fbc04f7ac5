# SPDX-License-Identifier: Apache-2.0
"""LTX-2 on two VAE ranks makes the frames and the sound that diffusers makes alone with the same tiles."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES
from PIL import Image

from tests.engine.engines import picture
from tests.engine.test_output import spoil
from vllm_omni_vae import DiffusionParallelConfig, Omni, tiny
from vllm_omni_vae.config import EngineConfig
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.ltx2 import Ltx2Profile
from vllm_omni_vae.pipelines.request import Audio, ComponentReport, Frames, GenerationResult, Stage
from vllm_omni_vae.pipelines.wan2_2 import WanProfile
from vllm_omni_vae.worker import loader

pytestmark = pytest.mark.distributed

FAMILIES = ("ltx2-i2v", "ltx2.3-t2v", "ltx2.5-i2v")
DISTILLED = FAMILIES[2]
TILE, STRIDE = 96, 64
SMALL: dict[str, Any] = {"width": 192, "height": 128, "num_frames": 9, "seed": 3}
GRID = (1, 2, 3)
STEPS: Mapping[str, dict[str, Any]] = {f: {"num_inference_steps": 2} for f in FAMILIES[:2]} | {DISTILLED: {}}
# What a denoiser of two blocks needs said that one of 48 has as its default, and what LTX-2.0 and 2.5 do without.
ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "ltx2-i2v": {"stg_scale": 0.0, "audio_stg_scale": 0.0, "use_cross_timestep": False, "guidance_scale": 3.0},
    "ltx2.3-t2v": {"spatio_temporal_guidance_blocks": [1], "guidance_scale": 3.0},
    DISTILLED: {
        "sigmas": DISTILLED_SIGMA_VALUES,
        "guidance_scale": 1.0,
        "audio_guidance_scale": 1.0,
        "stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_stg_scale": 0.0,
        "audio_modality_scale": 1.0,
    },
}
RATES = {"ltx2-i2v": 24_000, "ltx2.3-t2v": 48_000, DISTILLED: 48_000}
SOUND = "audio: decoded once, on the output rank"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in FAMILIES}


def start(folder: Path, ranks: int, dtype: str = "auto", tiles: str = "{0}x{0}", **parallel: Any) -> Omni:
    return Omni(
        dtype=dtype,
        model=str(folder),
        parallel_config=DiffusionParallelConfig(vae_patch_parallel_size=ranks, **parallel),
        vae_use_tiling=True,
        vae_tile_size=tiles.format(TILE),
        vae_tile_stride=tiles.format(STRIDE),
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def omni(family: str, checkpoints: Mapping[str, Path]) -> Iterator[Omni]:
    with start(checkpoints[family], 2) as omni:
        yield omni


def diffusers_alone(
    folder: Path, family: str, image: Frames | None, tile: int = TILE, stride: int = STRIDE, **asked: Any
) -> tuple[Frames, np.ndarray]:
    """Frames and samples of the clip `SMALL`, changed by ``asked``, as diffusers makes it here, in its own tiles."""
    seed = SMALL["seed"]
    asked = {name: value for name, value in (SMALL | STEPS[family] | asked).items() if name != "seed"}
    kind = diffusers.LTX2Pipeline if image is None else diffusers.LTX2ImageToVideoPipeline
    pipeline = kind.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling(tile, tile, tile_sample_stride_height=stride, tile_sample_stride_width=stride)
    images = {} if image is None else {"image": Image.fromarray(image)}
    torch.manual_seed(seed)
    video, sound = pipeline(
        prompt="a boat",
        frame_rate=24.0,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
        return_dict=False,
        **asked,
        **images,
        **ARGUMENTS[family],
    )
    return (video[0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy(), sound[0].numpy()


def generate(omni: Omni, family: str, image: Frames | None = None, **asked: Any) -> GenerationResult:
    return omni.generate("a boat", image=image, **(SMALL | STEPS[family] | asked))


def sound_of(result: GenerationResult) -> Audio:
    assert result.audio is not None
    return result.audio


@pytest.mark.parametrize("image", [None, picture(192, 128)], ids=["text", "image"])
def test_frames_and_sound_are_diffusers_own(
    image: Frames | None, family: str, omni: Omni, checkpoints: Mapping[str, Path]
) -> None:
    result = generate(omni, family, image, guidance_scale=ARGUMENTS[family]["guidance_scale"])
    frames, samples = diffusers_alone(checkpoints[family], family, image)
    operations = ["decode"] if image is None else ["encode", "decode"]
    found = [(d["operation"], d["strategy"], tuple(d["grid"]), tuple(d["tiles_per_rank"])) for d in result.decisions]
    assert found == [(operation, "tile", GRID, (3, 3)) for operation in operations]
    assert frames.std() > 5 and samples.std() > 0.005, "a grey clip or silence would prove nothing"
    np.testing.assert_array_equal(result.frames, frames)
    audio = sound_of(result)
    assert (audio.rate, audio.samples.dtype) == (RATES[family], np.float32)
    np.testing.assert_array_equal(audio.samples, samples)
    assert abs(audio.samples.shape[1] / audio.rate - 9 / 24) < 0.06
    assert set(result.stage_durations) == {stage.value for stage in (Stage.DENOISE, Stage.DECODE)} | (
        {Stage.ENCODE.value} if image is not None else set()
    )


def test_one_rank_makes_the_same_and_each_component_is_reported(
    family: str, omni: Omni, checkpoints: Mapping[str, Path]
) -> None:
    sound = [
        ComponentReport("audio_vae", "AutoencoderKLLTX2Audio", False, SOUND),
        ComponentReport("vocoder", "LTX2Vocoder" if family == "ltx2-i2v" else "LTX2VocoderWithBWE", False, SOUND),
    ]
    video, *rest = omni._engine.report
    assert (video.path, video.kind, video.parallel) == ("vae", "AutoencoderKLLTX2Video", True)
    assert (video.detail, video.selftest) == ("tile on 2 ranks", "2 checks, bit-equal")
    assert rest == sound
    with start(checkpoints[family], 1) as alone:
        assert alone._engine.report == (ComponentReport("vae", "AutoencoderKLLTX2Video", False, "one VAE rank"), *sound)
        # 160 pixels leave a tile of one latent over, which diffusers cannot pad by reflection as LTX-2.0 does.
        for asked in ({}, {"width": 160, "height": 160}):
            one, two = generate(alone, family, **asked), generate(omni, family, **asked)
            np.testing.assert_array_equal(one.frames, two.frames)
            np.testing.assert_array_equal(sound_of(one).samples, sound_of(two).samples)
            assert [d["grid"] for d in one.decisions] == [d["grid"] for d in two.decisions]


def test_a_clip_that_is_cut_in_time_is_the_same_on_one_rank(checkpoints: Mapping[str, Path]) -> None:
    family = FAMILIES[0]
    with (
        start(checkpoints[family], 1, tiles="{0}x{0}x16") as one,
        start(checkpoints[family], 2, tiles="{0}x{0}x16") as two,
    ):
        alone, shared = (generate(omni, family, width=128, height=96, num_frames=25) for omni in (one, two))
    np.testing.assert_array_equal(alone.frames, shared.frames)
    assert [tuple(d["grid"]) for d in (*alone.decisions, *shared.decisions)] == [(2, 1, 2)] * 2
    assert [d["tiles_per_rank"] for d in (*alone.decisions, *shared.decisions)] == [(4,), (2, 2)]


def test_a_decoder_beside_the_vae_is_left_alone(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    """The index of LTX-2.5 names one, which diffusers' pipeline does not take; here its weights are not even there."""
    folder = Path(shutil.copytree(checkpoints[DISTILLED], tmp_path / "copy"))
    index = json.loads((folder / "model_index.json").read_text())
    index["diffusion_decoder"] = ["diffusers", "LTX2VideoDiffusionDecoderModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(folder / "duration_head")
    with start(folder, 2) as omni:
        assert [report.path for report in omni._engine.report] == ["vae", "audio_vae", "vocoder"]
        assert generate(omni, DISTILLED).frames.std() > 5


@pytest.mark.parametrize("family", [DISTILLED])
def test_a_reference_larger_than_a_usual_tile_is_encoded_in_tiles_by_both_ranks(
    family: str, checkpoints: Mapping[str, Path]
) -> None:
    image = picture(576, 576)
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=2)
    with Omni(model=str(checkpoints[family]), parallel_config=parallel) as omni:
        result = generate(
            omni, family, image, width=576, height=576, guidance_scale=ARGUMENTS[family]["guidance_scale"]
        )
    found = [(d["operation"], d["strategy"], tuple(d["grid"]), sorted(d["tiles_per_rank"])) for d in result.decisions]
    assert found == [(operation, "tile", (1, 2, 2), [1, 3]) for operation in ("encode", "decode")]
    frames, samples = diffusers_alone(checkpoints[family], family, image, 512, 448, width=576, height=576)
    np.testing.assert_array_equal(result.frames, frames)
    np.testing.assert_array_equal(sound_of(result).samples, samples)


@pytest.mark.parametrize(
    "parallel", [{"ulysses_degree": 2}, {"use_hsdp": True, "hsdp_shard_size": 2}], ids=["tokens", "weights"]
)
def test_a_denoiser_that_is_shared_makes_the_same_clip(
    parallel: dict[str, Any], family: str, omni: Omni, checkpoints: Mapping[str, Path]
) -> None:
    """Two ranks add in another order, which rounds differently: a value of 255 may become the next."""
    asked = {"width": 96, "height": 96}
    with start(checkpoints[family], 2, **parallel) as shared:
        for image in (None, picture(96, 96)):
            alone, result = generate(omni, family, image, **asked), generate(shared, family, image, **asked)
            assert np.abs(result.frames.astype(int) - alone.frames).max() <= 1
            assert np.abs(sound_of(result).samples - sound_of(alone).samples).max() < 1e-4
        assert len(shared._engine.worker_pids) == 2


def test_one_type_goes_through_all_components_where_none_was_asked_for() -> None:
    """The image-to-video pipeline gives the VAE a picture in the text encoder's type."""
    config, device = EngineConfig(model=""), torch.device("cuda")
    assert loader._dtypes(config, device, Ltx2Profile()) is torch.bfloat16
    assert loader._dtypes(config, device, WanProfile()) == {"vae": torch.float32, "default": torch.bfloat16}


def test_bfloat16_makes_a_clip_of_a_picture_on_two_ranks(family: str, checkpoints: Mapping[str, Path]) -> None:
    with start(checkpoints[family], 2, dtype="bfloat16") as omni:
        result = generate(omni, family, picture(192, 128))
    assert [d["strategy"] for d in result.decisions] == ["tile", "tile"]
    assert result.frames.std() > 5 and sound_of(result).samples.std() > 0.005


def test_the_weights_are_sharded_block_by_block(
    family: str, checkpoints: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = diffusers.LTX2VideoTransformer3DModel.from_pretrained(checkpoints[family], subfolder="transformer")
    sharded: list[Any] = []
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module, mesh: sharded.append(module))
    loader._shard_weights([denoiser], None)
    assert sharded == [*denoiser.transformer_blocks, denoiser]


def test_what_a_request_says_of_the_guidance_is_heard(family: str, omni: Omni) -> None:
    usual = generate(omni, family)
    scale = 3 if family == DISTILLED else 1
    extra = {"modality_scale": scale, "guidance_rescale": 0, "audio_guidance_scale": scale}
    other = generate(omni, family, guidance_scale=scale, extra_params=extra)
    assert (usual.frames != other.frames).any()
    assert (sound_of(usual).samples != sound_of(other).samples).any()


@pytest.mark.parametrize(
    ("weights", "name", "value"),
    [
        ("vocoder/diffusion_pytorch_model.safetensors", "conv_out.bias", float("nan")),
        ("audio_vae/diffusion_pytorch_model.safetensors", "decoder.conv_out.conv.bias", float("inf")),
    ],
    ids=["samples that are not a number", "an infinite spectrogram, which the vocoder's tanh would hide"],
)
def test_sound_that_is_not_finite_fails_the_job(
    weights: str, name: str, value: float, checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints["ltx2-i2v"], tmp_path / "copy"))
    spoil(folder / weights, name, value)
    with start(folder, 1) as omni:
        with pytest.raises(EngineError, match="not finite") as caught:
            generate(omni, "ltx2-i2v", width=64, height=64)
        assert caught.value.code == "invalid_output"
