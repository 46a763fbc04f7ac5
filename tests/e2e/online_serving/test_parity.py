# SPDX-License-Identifier: Apache-2.0
"""One request to a server with one rank and to one with several, for each family, task and strategy: the pixels."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Checkpoint, Start
from tests.e2e.images import images_client, pictures
from tests.e2e.media import PHOTO, file_of, max_difference, photo, read_clip
from tests.helpers.mark import hardware_marks
from tests.helpers.server import Server
from vllm_omni_vae import VaeParallelMode

pytestmark = pytest.mark.e2e

SHARDS = (VaeParallelMode.SPATIAL_SHARD_HEIGHT, VaeParallelMode.SPATIAL_SHARD_WIDTH)
# On fewer than four ranks a grid is one of the other two.
GRID = VaeParallelMode.SPATIAL_SHARD_GRID
# Steps of 8 bits on average: a pixel that is rounded the other way makes H.264 choose other blocks. Images are compared
# without loss, where a pixel may be off by one step.
MOST_ROUNDED = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks run on, and how many there are."""

    platform: str
    ranks: int

    @property
    def modes(self) -> tuple[VaeParallelMode, ...]:
        return (*SHARDS, GRID) if self.ranks >= 4 else SHARDS


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A family and requests of every task that it has, small, but with a latent row for each of eight ranks.

    Attributes:
        family: Of the tiny checkpoints.
        tiles: Flags of a tile geometry that cuts them.
        fields: Of every request.
        tasks: Operations that each request needs, and what it has besides ``fields``.
    """

    family: str
    tiles: tuple[str, ...]
    fields: Mapping[str, Any]
    tasks: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]

    @property
    def image(self) -> bool:
        return "num_frames" not in self.fields

    def run(self, server: Server, fields: Mapping[str, Any]) -> "Output":
        """Make what ``fields`` ask for besides the case's own, as a user of the `openai` client does."""
        if not self.image:
            job = server.generate(**self.fields, **fields)
            file = server.content(job.id)
            return Output(file, read_clip(file).pixels, job.vae)
        images = images_client(server)
        asked = {name: self.fields[name] for name in ("prompt", "size")}
        more = {name: value for name, value in self.fields.items() if name not in asked}
        answer = (images.edit if "image" in fields else images.generate)(**asked, **fields, extra_body=more)
        return Output(answer.data[0].b64_json.encode(), pictures(answer)[0], answer.vae)


def _tiles(size: int, stride: int) -> tuple[str, ...]:
    return ("--vae-tile-size", f"{size}x{size}", "--vae-tile-stride", f"{stride}x{stride}")


CLIP = {"prompt": "a boat leaves the harbour", "num_inference_steps": 2, "num_frames": 9, "fps": 8, "seed": 11}
TEXT: tuple[tuple[str, ...], Mapping[str, Any]] = (("decode",), {})
PICTURE: tuple[tuple[str, ...], Mapping[str, Any]] = (("encode", "decode"), {"input_reference": PHOTO})

IMAGE = {"prompt": "the admiral before a window", "num_inference_steps": 2, "seed": 11, "size": "128x96"}
PHOTOGRAPH: tuple[tuple[str, ...], Mapping[str, Any]] = (("encode", "decode"), {"image": file_of(photo(128, 96))})

CASES = (
    Case("wan2.2-i2v", _tiles(48, 32), CLIP | {"size": "80x64", "num_frames": 5}, (PICTURE,)),
    Case("wan2.2-ti2v-5b", _tiles(64, 48), CLIP | {"size": "160x128"}, (TEXT, PICTURE)),
    Case("ltx2-t2v", _tiles(96, 64), CLIP | {"size": "256x256"}, (TEXT, PICTURE)),
    Case("ltx2.3-t2v", _tiles(96, 64), CLIP | {"size": "256x256"}, (TEXT, PICTURE)),
    Case("qwen-image", _tiles(64, 48), IMAGE, (TEXT, PHOTOGRAPH)),
    Case("z-image", (), IMAGE, (TEXT, PHOTOGRAPH)),
    Case("flux2-klein", (), IMAGE | {"size": "160x128"}, (TEXT, PHOTOGRAPH)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A clip or an image: its file, its pixels, and how the autoencoder made it."""

    file: bytes
    pixels: np.ndarray
    vae: list[dict[str, Any]]


Make = Callable[..., list[Output]]


def _settings(platform: str, ranks: int) -> Iterator[Any]:
    hardware = None if platform == "cpu" else "H100"
    seconds = 300 if platform == "cpu" else 3600
    marks = [*hardware_marks(res={platform: hardware}, num_cards=ranks), pytest.mark.timeout(seconds)]
    for case in CASES:
        yield pytest.param((Machine(platform, ranks), case), marks=marks, id=f"{case.family}-{platform}{ranks}")


@pytest.fixture(
    scope="module", params=[*_settings("cpu", 2), *_settings("cuda", 2), *_settings("cuda", 4), *_settings("cuda", 8)]
)
def setting(request: pytest.FixtureRequest) -> tuple[Machine, Case]:
    return request.param


@pytest.fixture(scope="module")
def machine(setting: tuple[Machine, Case]) -> Machine:
    return setting[0]


@pytest.fixture(scope="module")
def case(setting: tuple[Machine, Case]) -> Case:
    return setting[1]


@pytest.fixture(scope="module")
def hardware(machine: Machine) -> str:
    return machine.platform


@pytest.fixture(scope="module")
def make(case: Case, start: Start, checkpoint: Checkpoint) -> Make:
    """Start a server with some flags, do every task, and stop it."""
    model = checkpoint(case.family)

    def make(*flags: str) -> list[Output]:
        server = start("vllm-omni-vae", "serve", model, *flags)
        server.wait_until_healthy()
        made = [case.run(server, fields) for _, fields in case.tasks]
        assert server.stop() == 0, server.log
        return made

    return make


@pytest.fixture(scope="module")
def whole(make: Make) -> list[Output]:
    """One rank, un-tiled."""
    return make()


def test_tiles_on_several_ranks_are_the_file_of_one_rank_in_tiles(
    case: Case, machine: Machine, make: Make, whole: list[Output]
) -> None:
    one = make("--vae-use-tiling", *case.tiles)
    several = make("--vae-patch-parallel-size", str(machine.ranks), *case.tiles)
    for (operations, _), alone, shared, untiled in zip(case.tasks, one, several, whole, strict=True):
        assert [(d["operation"], d["strategy"]) for d in shared.vae] == [(name, "tile") for name in operations]
        assert all(len(d["tiles_per_rank"]) == machine.ranks and min(d["tiles_per_rank"]) > 0 for d in shared.vae)
        assert shared.file == alone.file
        assert untiled.pixels.std() > 5, "a grey clip would prove nothing"
        assert max_difference(untiled.pixels, alone.pixels) > 1, "tiles that change nothing would prove nothing"


@pytest.mark.parametrize("mode", [*SHARDS, GRID])
def test_a_shard_on_several_ranks_is_what_one_rank_makes_untiled(
    case: Case, machine: Machine, make: Make, whole: list[Output], mode: VaeParallelMode
) -> None:
    if mode not in machine.modes:
        pytest.skip(f"{mode} on {machine.ranks} ranks is {' or '.join(machine.modes)}")
    shared = make("--vae-patch-parallel-size", str(machine.ranks), "--vae-parallel-mode", mode, *case.tiles)
    for (operations, _), several, untiled in zip(case.tasks, shared, whole, strict=True):
        found = [(d["operation"], d["strategy"], d["fallback"]) for d in several.vae]
        assert found == [(name, mode, False) for name in operations]
        assert several.pixels.shape == untiled.pixels.shape
        if case.image:
            assert max_difference(several.pixels, untiled.pixels) <= 1
        else:
            assert np.abs(several.pixels.astype(int) - untiled.pixels).mean() < MOST_ROUNDED
