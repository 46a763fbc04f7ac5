# SPDX-License-Identifier: Apache-2.0
"""What `distribute` refuses, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

import vllm_omni_vae
from tests.helpers.vaes import latents, on_ranks, pixels, tiny_vae
from vllm_omni_vae.autoencoders import FAMILIES, DistributedAutoencoderKLWan, distribute, distributed_class
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import ConfigurationError, GeometryError, UnsupportedError

SHARDED = [mode for mode in VaeParallelMode if mode.value.startswith("spatial_shard")]


def snapshot(vae: AutoencoderKLWan) -> tuple[Any, ...]:
    tensors = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    return type(vae), tensors, dict(vae.config), set(vars(vae)), (vae.use_tiling, vae.use_slicing)


def assert_untouched(vae: AutoencoderKLWan, before: tuple[Any, ...]) -> None:
    kind, tensors, config, attributes, switches = before
    assert type(vae) is kind
    assert list(vae.state_dict()) == list(tensors)
    assert all(torch.equal(vae.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert dict(vae.config) == config
    assert set(vars(vae)) == attributes
    assert (vae.use_tiling, vae.use_slicing) == switches


def test_public_names() -> None:
    for name in vllm_omni_vae.__all__:
        assert getattr(vllm_omni_vae, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DistributedNothing'"):
        vllm_omni_vae.DistributedNothing  # noqa: B018


def test_families_are_found_by_their_class() -> None:
    assert distributed_class(tiny_vae()) is DistributedAutoencoderKLWan
    assert distributed_class(torch.nn.Linear(1, 1)) is None
    for family in FAMILIES:
        assert issubclass(family, family.spec.base_class)
        assert {VaeParallelMode.TILE, VaeParallelMode.AUTO} <= family.spec.modes


@pytest.mark.parametrize("other", [torch.nn.Linear(1, 1), object(), None])
@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_family_is_refused_at_any_size(other: object, size: int) -> None:
    expected = f"{type(other).__name__} cannot be distributed; families that can: AutoencoderKLWan"
    with pytest.raises(UnsupportedError, match=expected):
        distribute(other, size=size)


class TilesOnlySpec(type(DistributedAutoencoderKLWan.spec)):  # type: ignore[misc]
    """A family that cannot spread one feature map."""

    modes = frozenset({VaeParallelMode.TILE, VaeParallelMode.AUTO})


class TilesOnly(DistributedAutoencoderKLWan):
    spec = TilesOnlySpec()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", SHARDED)
def test_a_mode_that_the_family_lacks_is_refused_with_the_reason(mode: VaeParallelMode, size: int) -> None:
    vae = tiny_vae()
    vae.__class__ = TilesOnly
    before = snapshot(vae)
    expected = f"AutoencoderKLWan cannot run vae_parallel_mode {mode.value}; it has tile, auto"
    with pytest.raises(UnsupportedError, match=expected):
        vae.set_parallel_size(size, mode=mode.value)
    assert_untouched(vae, before)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"size": 0}, "VAE parallel size is 0; it counts ranks and must be at least 1"),
        ({"size": -1}, "VAE parallel size is -1"),
        ({"size": 2, "mode": "rank_split"}, "vae_parallel_mode 'rank_split' is not known"),
        ({"size": 1, "mode": "nothing"}, "vae_parallel_mode 'nothing' is not known"),
        ({"size": 2}, "2 VAE ranks were asked for but torch.distributed is not initialised"),
        ({"size": 2, "group": [0, 1]}, "torch.distributed is not initialised"),
    ],
)
def test_refused_and_untouched(arguments: dict[str, Any], reason: str) -> None:
    vae = tiny_vae(tiled=False)
    before = snapshot(vae)
    with pytest.raises(ConfigurationError, match=reason):
        distribute(vae, **arguments)
    assert_untouched(vae, before)


def test_a_geometry_that_cannot_work_is_refused_before_any_group_is_made() -> None:
    vae = tiny_vae(tiled=False)
    vae.tile_sample_min_height = 128  # the stride is still 192
    before = snapshot(vae)
    with pytest.raises(GeometryError, match="tile stride 192 is larger than the tile size 128"):
        distribute(vae, size=2)
    assert_untouched(vae, before)


@pytest.mark.parametrize("mode", ["tile", "auto"])
def test_one_rank_changes_nothing(mode: str) -> None:
    vae, plain = tiny_vae(), tiny_vae()
    before = snapshot(vae)
    assert distribute(vae, size=1, mode=mode) is vae
    assert_untouched(vae, before)
    z, x = latents(plain, 2, 5, 7), pixels(plain, 6, 40, 56)
    assert torch.equal(vae.decode(z).sample, plain.decode(z).sample)
    # Frames off the grid are diffusers' business when nothing is shared.
    assert torch.equal(vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters)


def test_the_distributed_class_on_one_rank_is_diffusers_own() -> None:
    vae, plain = tiny_vae(), tiny_vae()
    vae.__class__ = DistributedAutoencoderKLWan
    vae.set_parallel_size(1)
    assert not vae.is_distributed_enabled()
    z, x = latents(plain, 2, 5, 7), pixels(plain, 6, 40, 56)
    assert torch.equal(vae.decode(z).sample, plain.decode(z).sample)
    (sample,) = vae.decode(z, return_dict=False)
    assert torch.equal(sample, plain.decode(z).sample)
    assert torch.equal(vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters)
    with pytest.raises(ConfigurationError, match=r"init_distributed needs torch.distributed"):
        vae.init_distributed()
    assert not vae.is_distributed_enabled()


def test_state_dict_and_configuration_stay() -> None:
    plain = tiny_vae()

    def look(vae: Any, rank: int) -> Any:
        return {name: tensor.clone() for name, tensor in vae.state_dict().items()}, dict(vae.config), type(vae)

    for tensors, config, kind in on_ranks(2, plain, look):
        assert kind is DistributedAutoencoderKLWan
        assert list(tensors) == list(plain.state_dict())
        assert all(torch.equal(tensors[name], tensor) for name, tensor in plain.state_dict().items())
        assert config == dict(plain.config)


@pytest.mark.parametrize("name", ["wan2.1", "wan2.2-ti2v-5b"])
def test_a_saved_distributed_vae_is_a_plain_one(name: str, tmp_path: Path) -> None:
    plain = tiny_vae(name)
    plain.save_pretrained(tmp_path / "plain")
    on_ranks(2, plain, lambda vae, rank: vae.save_pretrained(tmp_path / f"rank {rank}"))
    files = {p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    for rank in range(2):
        folder = tmp_path / f"rank {rank}"
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == files
        assert json.loads((folder / "config.json").read_text())["_class_name"] == "AutoencoderKLWan"
        loaded = AutoencoderKLWan.from_pretrained(folder)
        assert type(loaded) is AutoencoderKLWan
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in plain.state_dict().items())


def test_the_distributed_class_loads_what_diffusers_saved(tmp_path: Path) -> None:
    plain = tiny_vae()
    plain.save_pretrained(tmp_path)
    loaded = DistributedAutoencoderKLWan.from_pretrained(tmp_path)
    assert type(loaded) is DistributedAutoencoderKLWan
    assert not loaded.is_distributed_enabled()
    assert loaded.to_json_string() == AutoencoderKLWan.from_pretrained(tmp_path).to_json_string()
    z = latents(plain, 1, 3, 4)
    assert torch.equal(loaded.decode(z).sample, plain.decode(z).sample)
