# SPDX-License-Identifier: Apache-2.0
"""Tiles on several ranks give what diffusers' sequential tiles give: no bit differs."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import RELEASED, VAES, decisions, latents, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, distribute

pytestmark = pytest.mark.distributed


@dataclasses.dataclass(frozen=True)
class Geometry:
    """An input: latent extents, and whether the pixels to encode go half a latent beyond, where the VAE can do that."""

    time: int
    height: int
    width: int
    batch: int = 1
    beyond: bool = False

    def input(self, config: str, vae: Any, operation: Operation, seed: int) -> torch.Tensor:
        if operation is Operation.DECODE:
            return latents(vae, self.time, self.height, self.width, batch=self.batch, seed=seed)
        frames = (VAES[config].frames(self.time) or (1,))[0]
        return pixels(vae, frames, *self.image(config, operation), batch=self.batch, seed=seed)

    def image(self, config: str, operation: Operation) -> tuple[int, int]:
        """Height and width of the pixels to encode, or of those that are decoded."""
        ratio = VAES[config].ratio
        beyond = self.beyond and operation is Operation.ENCODE and VAES[config].unit == 1
        more = ratio // 2 if beyond else 0
        return self.height * ratio + more, self.width * ratio + more


GEOMETRIES = (
    Geometry(2, 9, 9),
    Geometry(1, 5, 7, beyond=True),
    Geometry(2, 7, 5),
    Geometry(2, 8, 7, beyond=True),
    Geometry(1, 1, 9),
    Geometry(1, 9, 1),
    Geometry(2, 4, 5),
    Geometry(1, 3, 13),
    Geometry(2, 13, 3),
    Geometry(2, 4, 4),
    Geometry(1, 4, 6),
    Geometry(2, 5, 6, batch=2),
    Geometry(3, 5, 8),
    Geometry(1, 12, 5),
    Geometry(1, 10, 10),
)


def bit_equal(rank: int, size: int, *, config: str, dtype: str, operation: str, broadcast: bool, file: str) -> Any:
    """Case: every input of ``file`` on one VAE, one after the other."""
    vae = distribute(tiny_vae(config, getattr(torch, dtype)), size=size, broadcast_result=broadcast)
    way = Operation(operation)
    taken = decisions(vae)
    found = []
    for x, expected in torch.load(file):
        before = x.clone()
        result = run_public(vae, way, x, **VAES[config].given(way))
        same_shape = result.shape == expected.shape
        found.append(
            {
                "shape": list(result.shape),
                "dtype": str(result.dtype),
                "difference": float((result.double() - expected.double()).abs().max()) if same_shape else math.inf,
                "any": bool(result.any()),
                "input is kept": torch.equal(x, before),
                "decision": taken[-1].to_json(),
            }
        )
    assert len(taken) == len(found)
    return found


References = Callable[[str, str, str], tuple[str, list[torch.Tensor]]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """A file of inputs with what diffusers makes of them on one rank, and these results."""
    folder: Path = tmp_path_factory.mktemp("references")
    made: dict[tuple[str, str, str], list[torch.Tensor]] = {}

    @torch.no_grad()
    def references(config: str, dtype: str, operation: str) -> tuple[str, list[torch.Tensor]]:
        key = (config, dtype, operation)
        file = folder / "-".join(key)
        if key not in made:
            vae = tiny_vae(config, getattr(torch, dtype))
            pairs = []
            way = Operation(operation)
            for seed, geometry in enumerate(geometries(config, operation)):
                x = geometry.input(config, vae, way, seed)
                expected = run_public(vae, way, x, **VAES[config].given(way))
                pairs.append((x, VAES[config].finish(expected) if way is Operation.DECODE else expected))
            torch.save(pairs, file)
            made[key] = [expected for _, expected in pairs]
        return str(file), made[key]

    return references


def grid_of_diffusers(config: str, operation: str, geometry: Geometry) -> list[int] | None:
    """[1, rows, columns] of the tile loops in diffusers, or None where it does not tile."""
    tile_height, tile_width, *strides = VAES[config].grid or VAES[config].tile
    image = geometry.image(config, Operation(operation))
    if image[0] <= tile_height and image[1] <= tile_width:
        return None
    patch = VAES[config].layers.get("patch_size", 1) if operation == "encode" else 1
    return [1, *(len(range(0, extent // patch, stride)) for extent, stride in zip(image, strides, strict=True))]


def geometries(config: str, operation: str) -> list[Geometry]:
    """Those of which diffusers can run every tile; some VAEs cannot decode a tile of one latent."""
    tiny = VAES[config]
    if operation == "encode" or tiny.thinnest == 1:
        return list(GEOMETRIES)
    strides = [stride // tiny.ratio for stride in (tiny.grid or tiny.tile)[2:]]

    def runs(geometry: Geometry) -> bool:
        extents = (geometry.height, geometry.width)
        if grid_of_diffusers(config, operation, geometry) is None:
            return min(extents) >= tiny.thinnest
        return all((extent - 1) % stride + 1 >= tiny.thinnest for extent, stride in zip(extents, strides, strict=True))

    return [geometry for geometry in GEOMETRIES if runs(geometry)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "broadcast"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("operation", ["decode", "encode"])
@pytest.mark.parametrize("config", RELEASED)
def test_as_diffusers(
    config: str, operation: str, dtype: str, broadcast: bool, size: int, worlds: Worlds, references: References
) -> None:
    file, expected = references(config, dtype, operation)
    answers = worlds[size].run(
        bit_equal, config=config, dtype=dtype, operation=operation, broadcast=broadcast, file=file
    )
    inputs = geometries(config, operation)
    grids = [grid_of_diffusers(config, operation, g) for g in inputs]
    assert None in grids
    assert max(g[1] * g[2] for g in grids if g) >= 4
    for rank, found in enumerate(answers):
        for geometry, grid, whole, one in zip(inputs, grids, expected, found, strict=True):
            assert torch.isfinite(whole).all()
            assert one["input is kept"], geometry
            assert one["dtype"] == f"torch.{dtype}"
            decision = one["decision"]
            assert decision == answers[0][inputs.index(geometry)]["decision"], "the same on every rank"
            assert decision["operation"] == operation
            if grid is None:
                assert decision["strategy"] == "direct", geometry
            else:
                assert (decision["strategy"], list(decision["grid"])) == ("tile", grid), geometry
                assert sum(decision["tiles_per_rank"]) == grid[1] * grid[2]
                assert len(decision["tiles_per_rank"]) == size
            if grid is None or operation == "encode" or broadcast or rank == 0:
                assert (one["shape"], one["difference"]) == (list(whole.shape), 0.0), (rank, geometry)
            else:
                ones = [1] * (whole.dim() - 2)
                assert one["shape"] == [geometry.batch, whole.shape[1], *ones], (rank, geometry)
                assert not one["any"]
