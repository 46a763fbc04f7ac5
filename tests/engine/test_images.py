# SPDX-License-Identifier: Apache-2.0
"""Image models on two VAE ranks make the pixels that diffusers makes alone with the same tiles."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.engines import picture
from vllm_omni_vae import DiffusionParallelConfig, Omni, tiny
from vllm_omni_vae.pipelines.request import ComponentReport, Frames

pytestmark = pytest.mark.distributed

SEED = 3
WIDE, TALL = picture(96, 64), picture(64, 80, seed=1)
MASK = np.zeros((64, 96), np.uint8)
MASK[:, 40:] = 255


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A tiny checkpoint that is quick to run, its tiles, and what diffusers is told that the profile says of itself.

    Attributes:
        kind: The autoencoder's class.
        tile: Tile size and stride in pixels; None for a VAE whose checkpoint says it.
        told: Further arguments of the pipeline.
        masked: Class of the pipeline that fills in a part of an image.
        painted: Class of the pipeline that begins with an image; None where the usual one takes references.
    """

    kind: str
    tile: tuple[int, int] | None = None
    told: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    masked: str | None = None
    painted: str | None = None


FAMILIES: Mapping[str, Family] = {
    "qwen-image": Family(
        "AutoencoderKLQwenImage",
        (32, 24),
        {"negative_prompt": " ", "true_cfg_scale": 4.0},
        "QwenImageInpaintPipeline",
        "QwenImageImg2ImgPipeline",
    ),
    "z-image": Family("AutoencoderKL", None, {"guidance_scale": 0.0}, "ZImageInpaintPipeline", "ZImageImg2ImgPipeline"),
    "flux2": Family("AutoencoderKLFlux2", None, {"guidance_scale": 4.0}),
    "flux2-klein": Family("AutoencoderKLFlux2", None, {"guidance_scale": 1.0}, "Flux2KleinInpaintPipeline"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in FAMILIES}


def start(folder: Path, family: str, tiled: bool = True, **parallel: Any) -> Omni:
    tile = FAMILIES[family].tile if tiled else None
    geometry = (
        {} if tile is None else {"vae_tile_size": f"{tile[0]}x{tile[0]}", "vae_tile_stride": f"{tile[1]}x{tile[1]}"}
    )
    return Omni(
        model=str(folder),
        parallel_config=DiffusionParallelConfig(**parallel),
        vae_use_tiling=tiled,
        vae_selftest=False,
        **geometry,
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def omni(family: str, checkpoints: Mapping[str, Path]) -> Iterator[Omni]:
    with start(checkpoints[family], family, vae_patch_parallel_size=2) as omni:
        yield omni


@pytest.fixture(scope="module")
def alone(family: str, checkpoints: Mapping[str, Path]) -> Any:
    """Diffusers in this process, on one thread as a rank of two has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(checkpoints[family])
    pipeline.set_progress_bar_config(disable=True)
    tile = FAMILIES[family].tile
    pipeline.vae.enable_tiling(*(() if tile is None else (tile[0], tile[0], tile[1], tile[1])))
    yield pipeline
    torch.set_num_threads(threads)


def diffusers_alone(pipeline: Any, family: str, seed: int = SEED, kind: str | None = None, **asked: Any) -> Frames:
    """The image as diffusers makes it in this process."""
    if kind is not None:
        settings = {"is_distilled": True} if kind.startswith("Flux2Klein") else {}
        pipeline = getattr(diffusers, kind)(**pipeline.components, **settings)
        pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(seed)
    images = pipeline(
        prompt="a boat",
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
        **FAMILIES[family].told,
        **asked,
    ).images
    return pixels_of(images)


def pixels_of(images: torch.Tensor) -> Frames:
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def as_pil(*images: Frames) -> list[Image.Image]:
    return [Image.fromarray(image) for image in images]


def decided(result: Any) -> list[tuple[str, str, int, tuple[int, ...]]]:
    return [
        (d["operation"], d["strategy"], d["grid"][1] * d["grid"][2], tuple(d["tiles_per_rank"]))
        for d in result.decisions
    ]


def both_ranks_tiled(result: Any, *operations: str) -> bool:
    """Whether exactly these operations ran, each in tiles of which both ranks had some."""
    found = decided(result)
    return {operation for operation, *_ in found} == set(operations) and all(
        strategy == "tile" and sum(ranks) == tiles > 1 and len(ranks) == 2 and min(ranks) > 0
        for _, strategy, tiles, ranks in found
    )


def test_an_image_of_text_is_diffusers_own(family: str, omni: Omni, alone: Any) -> None:
    result = omni.generate("a boat", width=96, height=80, num_inference_steps=2, seed=SEED)
    assert both_ranks_tiled(result, "decode")
    expected = diffusers_alone(alone, family, width=96, height=80)
    assert expected.std() > 5, "a grey image would prove nothing"
    np.testing.assert_array_equal(result.frames, expected)
    assert result.fps is None and result.audio is None
    (report,) = omni._engine.report
    assert report == ComponentReport("vae", FAMILIES[family].kind, True, "tile on 2 ranks")


def test_an_image_of_references_is_diffusers_own(family: str, omni: Omni, alone: Any) -> None:
    kind = FAMILIES[family].painted
    images = (WIDE,) if kind else (WIDE, TALL)
    result = omni.generate("a boat", images=images, width=96, height=64, num_inference_steps=2, seed=SEED)
    assert both_ranks_tiled(result, "encode", "decode")
    given = as_pil(*images)
    expected = diffusers_alone(alone, family, kind=kind, image=given[0] if kind else given, width=96, height=64)
    np.testing.assert_array_equal(result.frames, expected)
    assert {"encode", "denoise", "decode"} == result.stage_durations.keys()


def test_the_size_of_a_reference_is_the_one_that_diffusers_takes(family: str, omni: Omni, alone: Any) -> None:
    if FAMILIES[family].painted:
        pytest.skip("the pipeline has a size of its own; see tests/pipelines")
    image = picture(106, 75)
    result = omni.generate("a boat", image=image, num_inference_steps=2, seed=SEED)
    assert result.frames.shape == (1, 64, 96, 3)
    np.testing.assert_array_equal(result.frames, diffusers_alone(alone, family, image=as_pil(image)))


def test_a_part_is_filled_in_as_diffusers_does(family: str, omni: Omni, alone: Any) -> None:
    kind = FAMILIES[family].masked
    if kind is None:
        pytest.skip("diffusers has no pipeline for it")
    asked: dict[str, Any] = {} if family.startswith("flux2") else {"width": 96, "height": 64}
    result = omni.generate("a boat", image=WIDE, mask=MASK, num_inference_steps=2, seed=SEED, **asked)
    assert both_ranks_tiled(result, "encode", "decode")
    image, mask = as_pil(WIDE, MASK)
    expected = diffusers_alone(alone, family, kind=kind, image=image, mask_image=mask, strength=1.0, **asked)
    np.testing.assert_array_equal(result.frames, expected)
    half = omni.generate(
        "a boat", image=WIDE, mask=MASK, num_inference_steps=2, seed=SEED, extra_params={"strength": 0.5}, **asked
    )
    assert (half.frames != result.frames).any()


def test_several_images_have_the_seeds_one_after_the_other(family: str, omni: Omni) -> None:
    asked: dict[str, Any] = {"width": 96, "height": 64, "num_inference_steps": 2}
    pair = omni.generate("a boat", num_images=2, seed=SEED, **asked)
    assert pair.frames.shape == (2, 64, 96, 3)
    assert (pair.frames[0] != pair.frames[1]).any()
    for place in range(2):
        single = omni.generate("a boat", seed=SEED + place, **asked)
        np.testing.assert_array_equal(pair.frames[place], single.frames[0])


SHARED = [
    pytest.param("qwen-image", {"ulysses_degree": 2}, id="qwen-image, tokens"),
    pytest.param("qwen-image", {"tensor_parallel_size": 2}, id="qwen-image, weights divided"),
    pytest.param(
        "flux2", {"tensor_parallel_size": 2, "vae_patch_parallel_size": 3}, id="flux2, weights and a follower"
    ),
    pytest.param("flux2-klein", {"ulysses_degree": 2}, id="flux2-klein, tokens"),
    pytest.param("z-image", {"use_hsdp": True, "hsdp_shard_size": 2}, id="z-image, weights sharded"),
]


@pytest.mark.parametrize(("family", "parallel"), SHARED, indirect=["family"], scope="module")
def test_a_denoiser_that_is_shared_makes_the_same_image(
    parallel: dict[str, Any], family: str, alone: Any, checkpoints: Mapping[str, Path]
) -> None:
    """Ranks add in another order, which rounds differently: a value of 255 may become the next. 80x80 are 25 tokens,
    which two ranks cannot have alike."""
    with start(checkpoints[family], family, **{"vae_patch_parallel_size": 2} | parallel) as shared:
        for size in ((96, 64), (80, 80)):
            asked = {"width": size[0], "height": size[1]}
            result = shared.generate("a boat", num_inference_steps=2, seed=SEED, **asked)
            expected = diffusers_alone(alone, family, **asked)
            assert expected.std() > 5
            assert np.abs(result.frames.astype(int) - expected).max() <= 1
            (decision,) = result.decisions
            assert (decision["strategy"], len(decision["tiles_per_rank"])) == ("tile", shared_vae_ranks(parallel))


def shared_vae_ranks(parallel: Mapping[str, Any]) -> int:
    return int(parallel.get("vae_patch_parallel_size", 2))


SHARDS = [("qwen-image", "spatial_shard_width"), ("flux2", "spatial_shard_height"), ("z-image", "spatial_shard_width")]


@pytest.mark.parametrize(("family", "mode"), SHARDS, indirect=["family"], scope="module")
def test_one_map_on_two_ranks_is_the_image_of_one_rank(
    mode: str, family: str, alone: Any, checkpoints: Mapping[str, Path]
) -> None:
    """Equal to the un-tiled image up to the order of additions, of which a value of 255 shows one step at most."""
    alone.vae.disable_tiling()
    try:
        expected = diffusers_alone(alone, family, width=96, height=80)
    finally:
        alone.vae.use_tiling = True
    with start(checkpoints[family], family, vae_patch_parallel_size=2, vae_parallel_mode=mode) as omni:
        result = omni.generate("a boat", width=96, height=80, num_inference_steps=2, seed=SEED)
        again = omni.generate("a boat", image=WIDE, width=96, height=64, num_inference_steps=2, seed=SEED)
    assert [d["strategy"] for d in result.decisions] == [mode]
    assert np.abs(result.frames.astype(int) - expected).max() <= 1
    assert {(d["operation"], d["strategy"]) for d in again.decisions} == {("encode", mode), ("decode", mode)}
