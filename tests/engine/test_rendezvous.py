# SPDX-License-Identifier: Apache-2.0
"""Ranks that only hold the autoencoder get the leader's input and every further argument of its calls."""

from typing import Any

import pytest
import torch

from tests.helpers.vaes import count_calls, decisions, latents, on_ranks, pixels, tiny_vae
from vllm_omni_vae.autoencoders import Operation
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld
from vllm_omni_vae.errors import UnsupportedError
from vllm_omni_vae.worker.rendezvous import LeaderRendezvous, dismiss, follow

MODES = [VaeParallelMode.TILE, VaeParallelMode.SPATIAL_SHARD_WIDTH]


def led(vae: Any, size: int, lead: Any, mode: VaeParallelMode = VaeParallelMode.TILE) -> list[Any]:
    """What ``lead(vae)`` returns on rank 0, and the shapes that the networks of each follower have seen."""
    control_world = LocalWorld(size)

    def body(mine: Any, rank: int) -> Any:
        control = LocalCommunicator(control_world, rank)
        state = mine.parallel_state
        if rank:
            ran = count_calls(mine.decoder), count_calls(mine.encoder)
            follow({"first": None, "vae": mine}, control, torch.device("cpu"), lambda: False)
            return ran
        state.rendezvous = LeaderRendezvous(1, state.groups.domain, control, True)
        try:
            return lead(mine)
        finally:
            dismiss(control)

    return on_ranks(size, vae, body, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [True, False, None])
@torch.no_grad()
def test_followers_run_with_the_leaders_arguments(mode: VaeParallelMode, causal: bool | None) -> None:
    plain = tiny_vae("ltx-2 timestep")
    plain.decoder.is_causal = plain.encoder.is_causal = False
    z, temb, x = latents(plain, 2, 5, 6, batch=2), torch.tensor([0.05, 0.4]), pixels(plain, 9, 24, 40)

    def lead(vae: Any) -> Any:
        taken = decisions(vae)
        sample = vae.decode(z, temb, causal=causal).sample
        moments = vae.encode(x, causal=causal).latent_dist.parameters
        return sample, moments, [decision.strategy.value for decision in taken]

    (sample, moments, taken), *followers = led(plain, 3, lead, mode)
    assert taken == [mode.value] * 2
    if mode is VaeParallelMode.TILE:
        assert torch.equal(sample, plain.decode(z, temb, causal=causal).sample)
        assert torch.equal(moments, plain.encode(x, causal=causal).latent_dist.parameters)
    else:
        plain.disable_tiling()
        assert float((sample - plain.decode(z, temb, causal=causal).sample).abs().max()) <= 1e-5
        assert float((moments - plain.encode(x, causal=causal).latent_dist.parameters).abs().max()) <= 1e-5
    assert all(decoded for decoded, _ in followers)


@torch.no_grad()
def test_a_timestep_that_is_none_and_a_family_that_takes_none() -> None:
    for name in ("ltx-2.3", "wan2.1"):
        plain = tiny_vae(name)
        z = latents(plain, 1, 5, 7)
        sample, *followers = led(plain, 2, lambda vae, z=z: vae.decode(z).sample)
        assert torch.equal(sample, plain.decode(z).sample)
        assert all(decoded for decoded, _ in followers)


def test_values_of_every_kind_arrive_as_they_were() -> None:
    given = {
        "none": None,
        "flag": True,
        "count": 3,
        "share": 0.1,
        "text": "zeros",
        "floats": torch.tensor([[0.5, -1.0]], dtype=torch.bfloat16),
        "long": torch.arange(4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    told: dict[str, Any] = {}

    class Told:
        """Stands for an autoencoder and keeps what it is called with."""

        def __init__(self, state: Any):
            self.parallel_state = state

        def tiled_decode(self, x: torch.Tensor, **arguments: Any) -> None:
            told["x"] = x
            told.update(arguments)

    x = torch.randn(1, 4, 2, 3)
    control_world = LocalWorld(2)

    def body(mine: Any, rank: int) -> None:
        control = LocalCommunicator(control_world, rank)
        state = mine.parallel_state
        if rank:
            follow({"vae": Told(state)}, control, torch.device("cpu"), lambda: False)
            return
        leader = LeaderRendezvous(0, state.groups.domain, control, True)
        _, mine_again = leader.announce(Operation.DECODE, x, given)
        assert list(mine_again) == list(given)
        with pytest.raises(UnsupportedError, match="the argument generator of type Generator"):
            leader.announce(Operation.DECODE, x, {"generator": torch.Generator()})
        dismiss(control)

    on_ranks(2, tiny_vae(), body)
    assert torch.equal(told.pop("x"), x)
    assert list(told) == list(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert told[name].dtype == value.dtype
            assert torch.equal(told[name], value)
        else:
            assert told[name] == value
            assert type(told[name]) is type(value)


def test_tensors_of_pipeline_ranks_become_the_leaders() -> None:
    def body(mine: Any, rank: int) -> Any:
        leader = LeaderRendezvous(0, mine.parallel_state.groups.domain, None, False)
        mine_x, temb = torch.full((2, 3), float(rank)), torch.full((2,), float(rank))
        decode = leader.announce(Operation.DECODE, mine_x, {"temb": temb, "causal": None})
        encode = leader.announce(Operation.ENCODE, mine_x, {"causal": True})
        return decode, encode

    for rank, ((x, arguments), (pixels_, more)) in enumerate(on_ranks(2, tiny_vae(), body)):
        assert not x.any()
        assert not arguments["temb"].any()
        assert arguments["causal"] is None
        assert torch.equal(pixels_, torch.full((2, 3), float(rank))), "pixels stay where they are"
        assert more == {"causal": True}


IMAGE = torch.rand(1, 6, 5, 3)
LAYOUTS = {
    "rows last": IMAGE.movedim(-1, 1).contiguous(),
    "channels last": IMAGE.movedim(-1, 1),
    "channels last, one frame": IMAGE.movedim(-1, 1).unsqueeze(2),
    "turned": IMAGE.movedim(-1, 1).transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", list(Operation))
def test_inputs_keep_their_order_in_memory(operation: Operation, layout: str) -> None:
    """An image that was an array has its channels last, and a convolution of that order rounds differently."""
    x = LAYOUTS[layout]
    arrived: list[torch.Tensor] = []

    class Told:
        """Stands for an autoencoder and keeps its input."""

        def __init__(self, state: Any):
            self.parallel_state = state

        def tiled_encode(self, given: torch.Tensor) -> None:
            arrived.append(given)

        tiled_decode = tiled_encode

    control_world = LocalWorld(2)

    def body(mine: Any, rank: int) -> None:
        control = LocalCommunicator(control_world, rank)
        if rank:
            follow({"vae": Told(mine.parallel_state)}, control, torch.device("cpu"), lambda: False)
            return
        leader = LeaderRendezvous(0, mine.parallel_state.groups.domain, control, True)
        arrived.append(leader.announce(operation, x, {})[0])
        arrived.append(leader.announce(operation, x[:, :, ..., 1:], {})[0])
        dismiss(control)

    on_ranks(2, tiny_vae(), body)
    whole = [tensor for tensor in arrived if tensor.shape == x.shape]
    part = [tensor for tensor in arrived if tensor.shape != x.shape]
    assert len(whole) == len(part) == 2
    for tensor in whole:
        assert torch.equal(tensor, x) and tensor.stride() == x.stride()
    for tensor in part:
        assert torch.equal(tensor, x[:, :, ..., 1:])
