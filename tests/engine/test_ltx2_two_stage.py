# SPDX-License-Identifier: Apache-2.0
"""LTX-2 in two stages on two VAE ranks is what diffusers makes alone, and can be followed and stopped in both."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import (
    DISTILLED_SIGMA_VALUES,
    STAGE_2_DISTILLED_SIGMA_VALUES,
    apply_image_conditioning_crf,
)
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.distributed.ranks import World
from tests.engine.engines import RESULT_SECONDS, Tape, cancel_when, during, picture, submit
from vllm_omni_vae import DiffusionParallelConfig, Omni, distribute, tiny
from vllm_omni_vae.config import EngineConfig, VaeConfig
from vllm_omni_vae.engine.api import Progress
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import Cancelled, ConfigurationError
from vllm_omni_vae.pipelines.request import ComponentReport, Frames, GenerationRequest, GenerationResult, Stage
from vllm_omni_vae.worker import loader

pytestmark = pytest.mark.distributed

NAME = "LTX2ImageToVideoTwoStagesPipeline"
TILE, STRIDE = 96, 64
STEPS, REFINING = 2, len(STAGE_2_DISTILLED_SIGMA_VALUES)
SMALL: dict[str, Any] = {"width": 256, "height": 128, "num_frames": 9, "num_inference_steps": STEPS, "seed": 3}
PICTURE = picture(256, 128)
# Of the reference image at full and at half size, and of the clip.
ENCODE = [("encode", (1, 2, 4), (4, 4)), ("encode", (1, 1, 2), (1, 1))]
DECODE = [("decode", (1, 2, 4), (4, 4))]
# Of LTX-2.0, and what switches every guidance off.
OURS: dict[str, Any] = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "use_cross_timestep": False}
UNGUIDED: dict[str, Any] = {
    "guidance_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
}
CRF = 33


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("ltx2-two-stage", tmp_path_factory.mktemp("checkpoint") / "ltx2")


def start(folder: Path, ranks: int, *, mode: str = "tile", dtype: str = "auto", **parallel: Any) -> Omni:
    return Omni(
        model=str(folder),
        model_class_name=NAME,
        dtype=dtype,
        parallel_config=DiffusionParallelConfig(vae_patch_parallel_size=ranks, vae_parallel_mode=mode, **parallel),
        vae_use_tiling=True,
        vae_tile_size=f"{TILE}x{TILE}",
        vae_tile_stride=f"{STRIDE}x{STRIDE}",
    )


@pytest.fixture(scope="module")
def omni(folder: Path) -> Iterator[Omni]:
    with start(folder, 2) as omni:
        yield omni


@pytest.fixture
def engine(omni: Omni) -> Engine:
    return omni._engine


def diffusers_alone(
    folder: Path, image: Frames | None = None, *, tiled: bool = True, distilled: bool = False
) -> tuple[Frames, np.ndarray]:
    """Frames and samples of the clip `SMALL` as diffusers' own pipelines make it in this process, one by one."""
    kind = diffusers.LTX2Pipeline if image is None else diffusers.LTX2ImageToVideoPipeline
    pipeline = kind.from_pretrained(folder)
    vae = pipeline.vae
    if tiled:
        vae.enable_tiling(TILE, TILE, tile_sample_stride_height=STRIDE, tile_sample_stride_width=STRIDE)
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder, subfolder="latent_upsampler")
    upsample = diffusers.LTX2LatentUpsamplePipeline(vae=vae, latent_upsampler=upsampler)
    for one in (pipeline, upsample):
        one.set_progress_bar_config(disable=True)
    shared: dict[str, Any] = {
        "prompt": "a boat",
        "num_frames": SMALL["num_frames"],
        "frame_rate": 24.0,
        "generator": torch.Generator("cpu").manual_seed(SMALL["seed"]),
        "return_dict": False,
        **OURS,
    }
    guided = {"num_inference_steps": STEPS, "guidance_scale": 3.0}
    if distilled:
        guided = {"num_inference_steps": 8, "sigmas": DISTILLED_SIGMA_VALUES, **UNGUIDED}
        del guided["guidance_rescale"], guided["audio_guidance_rescale"]
    images = {} if image is None else {"image": Image.fromarray(image)}
    latents, sound = pipeline(width=128, height=64, output_type="latent", **shared, **guided, **images)
    latents = upsample(latents=latents, output_type="latent", return_dict=False)[0]
    if image is not None:
        pixels = torch.from_numpy(apply_image_conditioning_crf(image, CRF)).permute(2, 0, 1).float() / 255 * 2 - 1
        with torch.no_grad():
            latents[:, :, :1] = vae.encode(pixels[None, :, None]).latent_dist.mode()
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(
        pipeline.scheduler.config, use_dynamic_shifting=False, shift_terminal=None
    )
    video, sound = pipeline(
        width=256,
        height=128,
        latents=latents,
        audio_latents=sound,
        num_inference_steps=REFINING,
        sigmas=STAGE_2_DISTILLED_SIGMA_VALUES,
        noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
        output_type="pt",
        **shared,
        **UNGUIDED,
    )
    return (video[0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy(), sound[0].numpy()


def samples_of(result: GenerationResult) -> np.ndarray:
    assert result.audio is not None
    return result.audio.samples


def decisions(result: GenerationResult) -> list[tuple[str, Any, Any]]:
    assert {d["strategy"] for d in result.decisions} == {"tile"}
    return [(d["operation"], tuple(d["grid"]), tuple(d["tiles_per_rank"])) for d in result.decisions]


def same(one: GenerationResult, other: GenerationResult) -> None:
    np.testing.assert_array_equal(one.frames, other.frames)
    np.testing.assert_array_equal(samples_of(one), samples_of(other))


@pytest.mark.parametrize("image", [None, PICTURE], ids=["text", "image"])
def test_frames_and_sound_are_diffusers_own(image: Frames | None, omni: Omni, folder: Path) -> None:
    result = omni.generate("a boat", image=image, guidance_scale=3.0, **SMALL)
    assert decisions(result) == (DECODE if image is None else ENCODE + DECODE)
    frames, samples = diffusers_alone(folder, image)
    assert frames.std() > 5 and samples.std() > 0.005, "a grey clip or silence would prove nothing"
    np.testing.assert_array_equal(result.frames, frames)
    np.testing.assert_array_equal(samples_of(result), samples)


def test_one_rank_makes_the_same_and_the_autoencoder_of_every_stage_is_shared(omni: Omni, folder: Path) -> None:
    kind = "AutoencoderKLLTX2Video"
    video, again, *sound = omni._engine.report
    assert video == ComponentReport("vae", kind, True, "tile on 2 ranks", "2 checks, bit-equal")
    assert again == ComponentReport("upsample_pipeline.vae", kind, True, "the same as vae")
    assert [(part.path, part.parallel) for part in sound] == [("audio_vae", False), ("vocoder", False)]
    assert omni._engine.card.pipeline_class == NAME
    two = [omni.generate("a boat", image=image, **SMALL) for image in (None, PICTURE)]
    with start(folder, 1) as alone:
        for image, result in zip((None, PICTURE), two, strict=True):
            same(alone.generate("a boat", image=image, **SMALL), result)
        assert not any(part.parallel for part in alone._engine.report)


def test_the_upsampler_has_the_autoencoder_that_is_shared_and_its_weights_stay(folder: Path) -> None:
    model = loader.load(EngineConfig(model=str(folder), model_class_name=NAME, vae=VaeConfig()), 0)
    assert list(model.vaes) == ["vae"], "named once, though two pipelines have it"
    assert model.pipeline.upsample_pipeline.vae is model.vaes["vae"] is model.pipeline.vae
    assert not model.pipeline.upsample_pipeline.latent_upsampler.training
    before = {name: tensor.clone() for name, tensor in model.vaes["vae"].state_dict().items()}
    scheduler = model.pipeline.scheduler
    request = model.profile.resolve(
        GenerationRequest(prompt="a boat", images=(PICTURE,), **SMALL), model.profile.card(folder)
    )
    with torch.no_grad():
        made = model.profile.call(model.pipeline, request, callback_on_step_end=lambda *step: step[-1])
    assert made.frames.shape == (9, 3, 128, 256)
    after = model.vaes["vae"].state_dict()
    assert before.keys() == after.keys() == load_file(folder / "vae/diffusion_pytorch_model.safetensors").keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert model.pipeline.scheduler is scheduler and scheduler.config.use_dynamic_shifting


def test_merged_weights_and_a_distilled_schedule_are_run_as_they_are(omni: Omni, folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = copy / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    adapted = [name for name in tensors if name.endswith("attn1.to_q.weight")]
    draws = torch.Generator().manual_seed(0)
    for name in adapted:
        rows, columns = tensors[name].shape
        tensors[name] += torch.randn(rows, 2, generator=draws) @ torch.randn(2, columns, generator=draws)
    save_file(tensors, weights, {"format": "pt"})
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(copy, subfolder="scheduler")
    type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift_terminal=None).save_pretrained(
        copy / "scheduler"
    )
    asked = {name: value for name, value in SMALL.items() if name != "num_inference_steps"}
    with start(copy, 2) as merged:
        assert (merged._engine.card.defaults.num_inference_steps, merged._engine.card.fixed_steps) == (8, 8)
        result = merged.generate("a boat", image=PICTURE, **asked)
    frames, samples = diffusers_alone(copy, PICTURE, distilled=True)
    assert len(adapted) == 4 and decisions(result) == ENCODE + DECODE
    np.testing.assert_array_equal(result.frames, frames)
    np.testing.assert_array_equal(samples_of(result), samples)


def test_one_feature_map_on_two_ranks_is_the_untiled_clip(folder: Path) -> None:
    with start(folder, 2, mode="spatial_shard_width") as shard:
        result = shard.generate("a boat", image=PICTURE, guidance_scale=3.0, **SMALL)
    assert [(d["operation"], d["strategy"]) for d in result.decisions] == [
        ("encode", "spatial_shard_width"),
        ("decode", "spatial_shard_width"),
    ]
    frames, samples = diffusers_alone(folder, PICTURE, tiled=False)
    assert np.abs(result.frames.astype(int) - frames).max() <= 1, "a value of 255 may round to the next"
    assert np.abs(samples_of(result) - samples).max() < 1e-4


def test_a_shared_denoiser_and_a_follower_make_the_same_clip(omni: Omni, folder: Path) -> None:
    """Two ranks add in another order, which rounds differently: a value of 255 may become the next."""
    with start(folder, 3, ulysses_degree=2) as shared:
        for image in (None, PICTURE):
            alone = omni.generate("a boat", image=image, **SMALL)
            result = shared.generate("a boat", image=image, **SMALL)
            assert {len(d["tiles_per_rank"]) for d in result.decisions} == {3}
            assert np.abs(result.frames.astype(int) - alone.frames).max() <= 1
            assert np.abs(samples_of(result) - samples_of(alone)).max() < 1e-4


def test_bfloat16_makes_a_clip_of_a_picture(folder: Path) -> None:
    with start(folder, 2, dtype="bfloat16") as omni:
        result = omni.generate("a boat", image=PICTURE, **SMALL)
    assert decisions(result) == ENCODE + DECODE
    assert result.frames.std() > 5 and samples_of(result).std() > 0.005


def request_of(engine: Engine, **changes: Any) -> GenerationRequest:
    return engine.resolve(GenerationRequest(prompt="a boat", images=(PICTURE,), **SMALL | changes))


def test_steps_of_both_stages_are_counted_and_no_stage_comes_back(engine: Engine) -> None:
    tape = Tape()
    submit(engine, request_of(engine), tape).future.result(RESULT_SECONDS)
    progress = [event for event in tape.events if isinstance(event, Progress)]
    steps = [(event.done, event.total) for event in progress if event.stage is Stage.DENOISE]
    assert steps == [(step, STEPS + REFINING) for step in range(1, STEPS + REFINING + 1)]
    order = [event.stage for event in progress]
    assert order == sorted(order, key=list(Stage).index), "encodes come first, the decode last"
    assert tape.stages == [Stage.ENCODE, Stage.DENOISE, Stage.DECODE]


@pytest.mark.parametrize(
    ("stage", "done"),
    [(Stage.ENCODE, 1), (Stage.DENOISE, 1), (Stage.DENOISE, STEPS + 1), (Stage.DECODE, 1)],
    ids=["encode", "stage 1", "stage 2", "decode"],
)
def test_a_job_is_cancelled_where_it_is_and_the_next_one_is_as_ever(stage: Stage, done: int, engine: Engine) -> None:
    def run() -> GenerationResult:
        return submit(engine, request_of(engine)).future.result(RESULT_SECONDS)

    before, pids = run(), engine.worker_pids
    handle, tape = cancel_when(engine, request_of(engine), during(stage, done))
    with pytest.raises(Cancelled):
        handle.future.result(RESULT_SECONDS)
    assert tape.stages[-1] is stage, "it went on to a later stage"
    same(run(), before)
    assert engine.worker_pids == pids and engine.health().healthy


def test_what_cannot_be_run_in_two_stages_is_refused_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("latent_upsampler")))
    with pytest.raises(ConfigurationError, match=f"{NAME} cannot be run as asked: --model-class-name: .*upsampler"):
        start(copy, 2)
    with pytest.raises(ConfigurationError, match=r"--model-class-name WanPipeline: .* can be run as LTX2Pipeline, "):
        Omni(model=str(folder), model_class_name="WanPipeline")


def upsampled_on_ranks(rank: int, size: int, *, folder: str, mode: str) -> Any:
    """Make a video twice as large with and without ranks; called on each of them."""
    pipelines = []
    for _ in range(2):
        pipeline = diffusers.LTX2LatentUpsamplePipeline(
            vae=diffusers.AutoencoderKLLTX2Video.from_pretrained(folder, subfolder="vae", dtype=torch.float64),
            latent_upsampler=LTX2LatentUpsamplerModel.from_pretrained(
                folder, subfolder="latent_upsampler", dtype=torch.float64
            ),
        )
        pipeline.set_progress_bar_config(disable=True)
        pipelines.append(pipeline)
    many = pipelines[1]
    for pipeline in pipelines if mode == "tile" else [many]:
        pipeline.vae.enable_tiling(TILE, TILE, tile_sample_stride_height=STRIDE, tile_sample_stride_width=STRIDE)
    decided = []
    many.vae = distribute(many.vae, size=size, mode=mode)
    many.vae.parallel_state.on_decision = decided.append
    video = [Image.fromarray(picture(192, 96, seed)) for seed in range(9)]
    made = [
        pipeline(
            video=video,
            width=192,
            height=96,
            generator=torch.Generator("cpu").manual_seed(0),
            output_type="pt",
            return_dict=False,
        )[0]
        for pipeline in pipelines
    ]
    ran = [(decision.operation.value, decision.strategy.value) for decision in decided]
    if rank > 0:
        return ran, None, None
    expected, found = made
    assert expected.shape == (1, 9, 3, 192, 384) and float(expected.std()) > 0.02
    return ran, torch.equal(expected, found), float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.parametrize("mode", ["tile", "spatial_shard_width"])
def test_a_whole_video_is_upsampled_by_diffusers_own_pipeline(mode: str, folder: Path, tmp_path: Path) -> None:
    """Encode of every frame, the upsampler on each rank, and decode of a video of four times the pixels."""
    world = World(2, tmp_path)
    try:
        ranks = world.run(upsampled_on_ranks, folder=str(folder), mode=mode)
    finally:
        world.close(kill=not world.alive)
    assert [ran for ran, *_ in ranks] == [[["encode", mode], ["decode", mode]]] * 2
    _, equal, error = ranks[0]
    assert equal if mode == "tile" else error <= 1e-12
