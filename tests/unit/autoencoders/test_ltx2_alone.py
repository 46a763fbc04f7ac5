# SPDX-License-Identifier: Apache-2.0
"""LTX-2 on one rank of a server: this package's tiles where diffusers' fail or are late, diffusers' own elsewhere."""

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video

from tests.helpers.vaes import count_calls, latents, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLLTX2Video, Operation
from vllm_omni_vae.config import DiffusionParallelConfig, TileExtent, VaeConfig
from vllm_omni_vae.pipelines.components import distribute_vaes

SPEC = DistributedAutoencoderKLLTX2Video.spec
ENCODE, DECODE = Operation
RATIO = 8
ALONE = DiffusionParallelConfig()
TILES = {"vae_tile_size": "32x32", "vae_tile_stride": "24x24"}
LONG = {"vae_tile_size": "32x32x16", "vae_tile_stride": "24x24x8"}


def alone(plain: Any, **tiles: str) -> Any:
    """A copy of ``plain`` as a server of one VAE rank has it."""
    vae = copy.deepcopy(plain)
    (report,) = distribute_vaes({"vae": vae}, VaeConfig(vae_use_tiling=True, **tiles), ALONE)
    assert (report.kind, report.parallel, report.detail) == ("AutoencoderKLLTX2Video", False, "one VAE rank")
    assert not vae.is_distributed_enabled()
    return vae


def on_two(plain: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    return on_ranks(2, plain, lambda vae, _: run_public(vae, operation, x))[0]


def cut_in_time(name: str) -> Any:
    plain = tiny_vae(name, tiled=False)
    SPEC.set_tiling(plain, TileExtent(32, 32, 16), TileExtent(24, 24, 8))
    return plain


@pytest.mark.parametrize(("height", "width"), [(7, 5), (4, 9), (10, 7)])
def test_a_leftover_that_reflection_cannot_pad_is_joined_as_on_two_ranks(height: int, width: int) -> None:
    plain = tiny_vae("ltx-2")
    z = latents(plain, 2, height, width)
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        plain.decode(z)
    assert torch.equal(run_public(alone(plain, **TILES), DECODE, z), on_two(plain, DECODE, z))


def test_an_encoder_that_pads_by_reflection_is_helped_too() -> None:
    plain = tiny_vae("ltx-2")
    for module in plain.encoder.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.padding_mode = "reflect"
            module._reversed_padding_repeated_twice = [p for p in reversed(module.padding) for _ in range(2)]
    x = pixels(plain, 9, 7 * RATIO, 5 * RATIO)
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        plain.encode(x)
    assert torch.equal(run_public(alone(plain, **TILES), ENCODE, x), on_two(plain, ENCODE, x))


@pytest.mark.parametrize("name", ["ltx-2", "ltx-2.3"])
@pytest.mark.parametrize(("height", "width"), [(3, 4), (5, 6)], ids=["whole pictures", "cut in space too"])
def test_a_clip_that_is_cut_in_time_has_each_frame_in_its_place(name: str, height: int, width: int) -> None:
    plain = cut_in_time(name)
    z = latents(plain, 5, height, width)
    mine = run_public(alone(plain, **LONG), DECODE, z)
    assert torch.equal(mine, on_two(plain, DECODE, z))
    late = run_public(plain, DECODE, z)
    assert torch.equal(mine[:, :, :9], late[:, :, :9]) and not torch.equal(mine[:, :, 9:], late[:, :, 9:])
    x = pixels(plain, 33, height * RATIO, width * RATIO)
    assert torch.equal(run_public(alone(plain, **LONG), ENCODE, x), run_public(plain, ENCODE, x))


@pytest.mark.parametrize("operation", list(Operation))
def test_elsewhere_the_methods_are_diffusers_own(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_vae("ltx-2")
    x = latents(plain, 2, 5, 6) if operation is DECODE else pixels(plain, 9, 40, 48)
    expected = run_public(plain, operation, x)
    theirs = getattr(AutoencoderKLLTX2Video, f"tiled_{operation}")
    ran = []

    def tiled(vae: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(vae)
        return theirs(vae, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKLLTX2Video, f"tiled_{operation}", tiled)
    vae = alone(plain, **TILES)
    calls = count_calls(vae.decoder if operation is DECODE else vae.encoder)
    assert torch.equal(run_public(vae, operation, x), expected)
    assert ran == [vae] and len(calls) == 4


def test_without_tiling_or_for_a_family_that_diffusers_gets_right_nothing_is_changed() -> None:
    for vae, config in ((tiny_vae("ltx-2", tiled=False), VaeConfig()), (tiny_vae(), VaeConfig(vae_use_tiling=True))):
        before, attributes = type(vae), set(vars(vae))
        distribute_vaes({"vae": vae}, config, ALONE)
        assert type(vae) is before and set(vars(vae)) <= attributes | {"use_tiling"}
