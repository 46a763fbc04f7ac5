# SPDX-License-Identifier: Apache-2.0
"""One VAE, many kinds of request, one after the other; and how many bytes they move."""

from math import prod
from typing import Any

import pytest
import torch
from diffusers.video_processor import VideoProcessor

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import decisions, latents, pixels, tiny_vae
from vllm_omni_vae.autoencoders import distribute
from vllm_omni_vae.geometry import deal

pytestmark = pytest.mark.distributed

# Facts before and after the decision, outcome of the tiles, gather, outcome of the merge, broadcast.
MOST_COLLECTIVES = 6


def difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else None


def batches(rank: int, size: int, *, slicing: bool) -> Any:
    """Case: a batch of three, whole or sliced by diffusers."""
    plain, vae = tiny_vae(), tiny_vae()
    plain.use_slicing = vae.use_slicing = slicing
    distribute(vae, size=size)
    taken = decisions(vae)
    z, x = latents(plain, 2, 6, 7, batch=3), pixels(plain, 5, 48, 56, batch=3)
    before = vae._vae_parallel.groups.work.traffic.messages
    got = vae.decode(z).sample
    messages = vae._vae_parallel.groups.work.traffic.messages - before
    sample = difference(got, plain.decode(z).sample) if rank == 0 else list(got.shape)
    posterior = difference(vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters)
    return [sample, posterior, messages, [list(d.grid) for d in taken]]


@pytest.mark.parametrize(("slicing", "messages"), [(False, 1), (True, 3)])
def test_batches(slicing: bool, messages: int, worlds: Worlds) -> None:
    first, *others = worlds[3].run(batches, slicing=slicing)
    grids = [[1, 2, 3], [1, 2, 3]]
    assert first == [0.0, 0.0, 0, grids]
    assert others == [[[3, 3, 1, 1, 1], 0.0, messages, grids]] * 2


def alternating(rank: int, size: int, *, config: str) -> Any:
    """Case: large and small, transposed, one frame and more, decode and encode in turn on one VAE."""
    plain, vae = tiny_vae(config), tiny_vae(config)
    distribute(vae, size=size, broadcast_result=True)
    taken = decisions(vae)
    ratio = plain.spatial_compression_ratio
    found = []
    for seed, (time, height, width) in enumerate([(3, 10, 5), (1, 2, 2), (1, 5, 10), (2, 4, 9), (1, 1, 1), (2, 10, 5)]):
        z = latents(plain, time, height, width, seed=seed)
        x = pixels(plain, 1 + 4 * (time - 1), height * ratio, width * ratio, seed=seed)
        for _ in range(2):
            found.append(difference(vae.decode(z).sample, plain.decode(z).sample))
            found.append(difference(vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters))
    return [found, [d.strategy.value for d in taken]]


@pytest.mark.parametrize("config", ["wan2.1", "wan2.2-ti2v-5b"])
@pytest.mark.parametrize("size", [2, 4])
def test_sizes_alternate_on_one_vae(size: int, config: str, worlds: Worlds) -> None:
    tiled, direct = ["tile"] * 4, ["direct"] * 4
    for found, strategies in worlds[size].run(alternating, config=config):
        assert found == [0.0] * 24
        assert strategies == tiled + direct + tiled + tiled + direct + tiled


def channels_last(rank: int, size: int) -> Any:
    """Case: inputs whose channels lie innermost."""
    plain = tiny_vae()
    vae = distribute(tiny_vae(), size=size, broadcast_result=True)
    found = []
    for batch in (1, 2):
        z = latents(plain, 2, 7, 8, batch=batch).to(memory_format=torch.channels_last_3d)
        x = pixels(plain, 5, 56, 64, batch=batch).to(memory_format=torch.channels_last_3d)
        sample, got = plain.decode(z).sample, vae.decode(z).sample
        moments, got_moments = plain.encode(x).latent_dist.parameters, vae.encode(x).latent_dist.parameters
        found.append(
            [
                difference(got, sample),
                got.stride() == sample.stride(),
                difference(got_moments, moments),
                got_moments.stride() == moments.stride(),
                z.is_contiguous(memory_format=torch.channels_last_3d),
            ]
        )
    return found


def test_channels_last_input(worlds: Worlds) -> None:
    assert worlds[2].run(channels_last) == [[[0.0, True, 0.0, True, True]] * 2] * 2


def views(rank: int, size: int) -> Any:
    """Case: inputs that are crops of larger tensors, differently on each rank."""
    plain = tiny_vae()
    vae = distribute(tiny_vae(), size=size, broadcast_result=True)
    z, x = latents(plain, 2, 7, 8), pixels(plain, 5, 56, 64)
    room = torch.full((1, 4, 3, 9, 10), float(rank))
    room[:, :, 1:, 1:8, rank : rank + 8] = z
    found = [difference(vae.decode(room[:, :, 1:, 1:8, rank : rank + 8]).sample, plain.decode(z).sample)]
    x_view = x if rank else x.transpose(3, 4).contiguous().transpose(3, 4)
    found.append(difference(vae.encode(x_view).latent_dist.parameters, plain.encode(x).latent_dist.parameters))
    return found


def test_inputs_that_are_views(worlds: Worlds) -> None:
    assert worlds[2].run(views) == [[0.0, 0.0]] * 2


def posteriors(rank: int, size: int) -> Any:
    """Case: one generator's sample of the posterior, on one rank and on all."""
    plain = tiny_vae()
    vae = distribute(tiny_vae(), size=size)
    x = pixels(plain, 5, 56, 64)
    one = plain.encode(x).latent_dist.sample(torch.Generator().manual_seed(3))
    many = vae.encode(x).latent_dist.sample(torch.Generator().manual_seed(3))
    (as_tuple,) = vae.encode(x, return_dict=False)
    return [difference(many, one), difference(as_tuple.mode(), plain.encode(x).latent_dist.mode()), float(one.std())]


def test_the_same_latents_are_sampled(worlds: Worlds) -> None:
    for sampled, mode, spread in worlds[3].run(posteriors):
        assert (sampled, mode) == (0.0, 0.0)
        assert spread > 0.1


def pipeline_tail(rank: int, size: int) -> Any:
    """Case: what a pipeline does with the sample, on every rank."""
    vae = distribute(tiny_vae(), size=size)
    plain = tiny_vae()
    processor = VideoProcessor(vae_scale_factor=8)
    found = []
    for batch in (1, 2):
        z = latents(plain, 2, 7, 8, batch=batch)
        (sample,) = vae.decode(z, return_dict=False)
        owned = torch.equal(sample, plain.decode(z).sample)
        array = processor.postprocess_video(sample, output_type="np")
        tensor = processor.postprocess_video(sample, output_type="pt")
        images = processor.postprocess_video(sample, output_type="pil")
        found.append([owned, list(array.shape), list(tensor.shape), [len(images), len(images[0]), *images[0][0].size]])
    return found


def test_a_pipeline_s_tail_runs_on_every_rank(worlds: Worlds) -> None:
    first, second = worlds[2].run(pipeline_tail)
    assert first == [[True, [b, 5, 56, 64, 3], [b, 5, 3, 56, 64], [b, 5, 64, 56]] for b in (1, 2)]
    assert second == [[False, [b, 1, 1, 1, 3], [b, 1, 3, 1, 1], [b, 1, 1, 1]] for b in (1, 2)]


def bytes_moved(rank: int, size: int, *, config: str) -> Any:
    """Case: what this rank sends in a decode and an encode, and how many bytes its tiles' outputs have."""
    vae = distribute(tiny_vae(config, torch.bfloat16), size=size, output_rank=1)
    ratio = vae.spatial_compression_ratio
    z, x = latents(vae, 2, 9, 9), pixels(vae, 5, 9 * ratio, 9 * ratio)
    found = []
    for split, call, data, group in (
        (vae.tile_split, vae.decode, z, vae._vae_parallel.groups.work),
        (vae.encode_tile_split, vae.encode, x, vae._vae_parallel.groups.domain),
    ):
        seen = data
        if call == vae.encode and vae.config.patch_size:
            seen = torch.nn.functional.pixel_unshuffle(data.transpose(1, 2), 2).transpose(1, 2)
        tasks, spec = split(seen)
        owned = deal([task.workload for task in tasks], size).tasks_of(rank)
        traffic = group.traffic
        before = (traffic.messages, traffic.bytes, traffic.broadcast_bytes, sum(traffic.collectives.values()))
        call(data)
        after = (traffic.messages, traffic.bytes, traffic.broadcast_bytes, sum(traffic.collectives.values()))
        result = prod(spec.output_shape or ()) * 2
        mine = sum(prod(tasks[i].output_shape or ()) * 2 for i in owned)
        found.append([[b - a for a, b in zip(before, after, strict=True)], mine, result])
    return found


@pytest.mark.parametrize("config", ["wan2.1", "wan2.2-ti2v-5b"])
def test_tiles_travel_once(config: str, worlds: Worlds) -> None:
    answers = worlds[3].run(bytes_moved, config=config)
    for rank, ((decode, mine, _), (encode, mine_encoded, moments)) in enumerate(answers):
        owner = rank == 1
        # An encode's result is broadcast as well.
        assert decode[:3] == [0 if owner else 1, 0 if owner else mine, 0], rank
        expected = 0 if owner else mine_encoded
        assert encode[:3] == [int(expected > 0), expected, moments if owner else 0], rank
        assert max(decode[3], encode[3]) <= MOST_COLLECTIVES
    assert sum(mine for (_, mine, _), _ in answers) > answers[0][0][2], "tiles overlap"


def frames(rank: int, size: int, *, counts: list[int]) -> Any:
    """Case: frame counts on and off the grid."""
    plain = tiny_vae()
    vae = distribute(tiny_vae(), size=size)
    found: list[Any] = []
    for count in counts:
        x = pixels(plain, count, 56, 64)
        try:
            got = vae.encode(x).latent_dist.parameters
            found.append(difference(got, plain.encode(x).latent_dist.parameters))
        except ValueError as error:
            found.append(str(error))
    return found


def test_frames_off_the_grid_are_refused_and_those_on_it_are_exact(worlds: Worlds) -> None:
    for off_2, one, off_4, nine, off_6 in worlds[2].run(frames, counts=[2, 1, 4, 9, 6]):
        assert (one, nine) == (0.0, 0.0)
        assert "ignore the rest of 2; give 1 or 5" in off_2
        assert "give 1 or 5" in off_4
        assert "give 5 or 9" in off_6
