# SPDX-License-Identifier: Apache-2.0
"""Let ranks of a sequence-parallel denoiser hold different numbers of tokens where gloo carries the messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks import context_parallel
from diffusers.models._modeling_parallel import gather_size_by_comm


class _PaddedGather(context_parallel.ContextParallelGatherHook):  # type: ignore[misc, name-defined, unused-ignore]
    """Joins tokens as its base does; on the way, every rank's are padded to the longest's."""

    def post_forward(self, module: Any, output: Any) -> Any:
        alone = isinstance(output, torch.Tensor)
        parts = [output] if alone else list(output)
        group = self.parallel_config._flattened_mesh.get_group()
        joined = [
            part if plan is None else _join(part, plan.gather_dim, group)
            for part, plan in zip(parts, self.metadata, strict=True)
        ]
        return joined[0] if alone else tuple(joined)


def _join(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Collective. The parts of all ranks side by side along ``dim``, along which they may differ."""
    sizes = gather_size_by_comm(part.shape[dim], group)
    part = part.movedim(dim, 0)
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group)
    whole = torch.cat([other[:size] for other, size in zip(received, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


@contextlib.contextmanager
def uneven_joins(device: torch.device) -> Iterator[None]:
    """Within it, a denoiser on the CPU that is made sequence parallel gets joins that gloo can do.

    Diffusers gathers tensors of different sizes, which NCCL takes and gloo refuses.
    """
    usual = context_parallel.ContextParallelGatherHook
    if device.type == "cpu":
        context_parallel.ContextParallelGatherHook = _PaddedGather
    try:
        yield
    finally:
        context_parallel.ContextParallelGatherHook = usual
