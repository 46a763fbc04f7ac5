# SPDX-License-Identifier: Apache-2.0
"""One feature map spread over ranks that are threads, beside the same map in one piece."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, Traffic
from vllm_omni_vae.errors import DeadlockError
from vllm_omni_vae.geometry import Partition, RankGrid
from vllm_omni_vae.sharding import ShardLayout, SpatialShard


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What one rank did.

    Attributes:
        result: What the function returned, or None.
        error: What it raised, or None.
        traffic: What the rank sent.
        shard: Its shard.
    """

    result: Any
    error: Exception | None
    traffic: Traffic
    shard: SpatialShard


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """``rows x cols`` ranks over ``latents`` rows and columns.

    Attributes:
        rows, cols: Ranks along height and along width.
        latents: Latent rows and columns of the whole.
    """

    rows: int
    cols: int
    latents: tuple[int, int]

    @property
    def size(self) -> int:
        return self.rows * self.cols

    def layout(self, rank: int) -> ShardLayout:
        height, width = self.latents
        return ShardLayout(
            RankGrid(self.rows, self.cols), Partition(height, self.rows), Partition(width, self.cols), rank
        )

    def ratio(self, whole: torch.Tensor) -> int:
        """Units of ``whole`` that make a latent, where no remainder is left."""
        ratio, rest = divmod(whole.shape[-2], self.latents[0])
        assert not rest, "with a remainder the ratio must be given"
        return ratio

    def pieces(self, whole: torch.Tensor, ratio: int | None = None) -> list[torch.Tensor]:
        """Each rank's share of ``whole``."""
        return [self.layout(rank).local(whole, ratio or self.ratio(whole)) for rank in range(self.size)]

    def each(self, function: Callable[[LocalCommunicator, SpatialShard], Any]) -> list[Ran]:
        """Call ``function`` on every rank, outside of the shard's block; errors are caught, a deadlock is not."""

        def body(comm: LocalCommunicator) -> Ran:
            shard = SpatialShard(comm, self.layout(comm.rank))
            try:
                return Ran(function(comm, shard), None, comm.traffic, shard)
            except DeadlockError:
                raise
            except Exception as error:
                return Ran(None, error, comm.traffic, shard)

        with_gradients_off = torch.no_grad()(body)
        return LocalWorld(self.size).run(with_gradients_off)

    def run(self, operator: Callable[..., Any], *wholes: torch.Tensor, ratio: int | None = None) -> list[Ran]:
        """Call ``operator`` on every rank's piece of ``wholes`` within the shard's block."""

        def body(comm: LocalCommunicator, shard: SpatialShard) -> Any:
            mine = [shard.shard(whole, ratio or self.ratio(whole)) for whole in wholes]
            with shard:
                return operator(*mine)

        return self.each(body)


def results(ran: list[Ran]) -> list[Any]:
    """What every rank returned; the first error if there is one."""
    for one in ran:
        if one.error:
            raise one.error
    return [one.result for one in ran]


def worst(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest difference of any rank's piece; the shapes must be right."""
    assert [tuple(g.shape) for g in got] == [tuple(w.shape) for w in wanted]
    return max(float((g.double() - w.double()).abs().max()) for g, w in zip(got, wanted, strict=True))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal noise, the same within a shard's block and outside of it."""
    with torch._C.DisableTorchFunction():
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
