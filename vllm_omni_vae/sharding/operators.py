# SPDX-License-Identifier: Apache-2.0
"""How torch operators that are not local in space act on a shard.

An operator that is in no table here is local: it works on each position, on channels or on time, and runs as it is.
Operators that would mix rows in a way that is not written down are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..distributed import Communicator
from ..errors import UnsupportedError
from .draws import draws
from .extended import carriers, extend, extension
from .halo import Edge, pad_with_halos
from .layout import ShardLayout
from .refused import refusals
from .time import along_time, each, frame_mask, pools, transposed

Handler = Callable[..., Any]


class Operators:
    """The table for one rank and one feature map; calls are made with the interception off.

    Args:
        comm: The ranks of ``layout``.
        layout: Who holds what.
    """

    def __init__(self, comm: Communicator, layout: ShardLayout):
        self._comm = comm
        self._layout = layout
        self.attention_calls = 0
        self.table: dict[Any, Handler] = {
            F.pad: self.pad,
            torch.conv2d: self.convolution(torch.conv2d),
            torch.conv3d: self.convolution(torch.conv3d),
            torch.conv1d: self.pointwise_convolution,
            F.group_norm: self.group_norm,
            F.scaled_dot_product_attention: self.attention,
            F.interpolate: self.interpolate,
            torch.group_norm: self.group_norm,
            F.batch_norm: self.batch_norm,
            **{f: self.normalize_last(f) for f in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)},
        }
        self.table |= refusals(layout) | draws(layout) | pools(layout) | carriers()
        self.table |= {f: transposed(layout, f) for f in (torch.conv_transpose2d, torch.conv_transpose3d)}
        self.table[F.max_pool2d_with_indices] = self._pool(F.max_pool2d_with_indices, indices=True)
        self.table |= {f: self._pool(f) for f in (F.avg_pool2d, F.max_pool2d, torch.max_pool2d)}

    def pad(self, x: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> torch.Tensor:
        """Interior edges get the neighbour's rows, true edges the padding itself."""
        pad = list(pad)
        spatial, outer = (pad + [0] * 4)[:4], pad[4:]
        width, height = spatial[:2], spatial[2:]
        cut = [p for dim, p in ((-1, width), (-2, height)) if self._layout.sharded(dim)]
        ready = extension(x) or {-1: Edge(), -2: Edge()}
        if not any(any(p) for p in cut):
            padded = F.pad(x, pad, mode, value)
            return extend(padded, ready) if not any(spatial) else padded
        if x.dim() == 3 and along_time(self._layout, x.shape[0], x.shape[-1]):
            return F.pad(x, pad, mode, value)
        if x.dim() < 4:
            raise UnsupportedError(f"F.pad with {pad} on positions of {tuple(x.shape)} is not known on a shard")
        if min(min(p) for p in cut) < 0:
            raise UnsupportedError(f"F.pad with {pad} cuts rows off a sharded axis")
        for dim, added in ((-1, width), (-2, height)):
            if self._layout.sharded(dim) and ready[dim] != Edge() and any(added):
                raise UnsupportedError(f"F.pad with {pad} on a sharded axis that is padded already")
        if mode == "circular" or min(spatial) < 0:
            raise UnsupportedError(f"F.pad with {pad} and mode {mode!r} has no meaning on a shard")
        inside = tuple(outer) if mode == "constant" and min(outer, default=0) >= 0 else ()
        extended = pad_with_halos(
            x,
            self._comm,
            self._layout,
            Edge.same(*height),
            Edge.same(*width),
            outer=inside,
            mode=mode,
            value=value or 0.0,
        )
        if any(outer) and not inside:
            extended = F.pad(extended, [0] * 4 + outer, mode, value)
        both = {
            dim: Edge.same(ready[dim].before + before, ready[dim].after + after)
            for dim, (before, after) in ((-1, width), (-2, height))
        }
        return extend(extended, both)

    def convolution(self, function: Handler) -> Handler:
        """The handler of `torch.conv2d` or `torch.conv3d`."""

        def convolve(
            input: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> torch.Tensor:
            dims = weight.dim() - 2
            strides, dilations = each(stride, dims), each(dilation, dims)
            reach = [d * (k - 1) + 1 for d, k in zip(dilations, weight.shape[2:], strict=True)]
            pads = _paddings(padding, reach, dims)
            ready = extension(input)
            sizes = {-2: input.shape[-2], -1: input.shape[-1]}
            edges, kept = {}, {-1: Edge(), -2: Edge()}
            for dim in (-2, -1):
                if ready and max(reach) > 1 and (reach[dim], strides[dim], pads[dim]) == (1, 1, 0):
                    kept[dim] = ready[dim]
                    sizes[dim] -= ready[dim].before + ready[dim].after
                elif not self._layout.sharded(dim):
                    sizes[dim] -= ready[dim].before + ready[dim].after if ready else 0
                elif ready is None:
                    edges[dim] = _edge(function, reach[dim], strides[dim], pads[dim])
                    pads[dim] = 0
                else:
                    sizes[dim] -= _check_ready(function, ready[dim], reach[dim], strides[dim], pads[dim])
            self._check_aligned(function, sizes[-2], sizes[-1], strides)
            if any(edge != Edge() for edge in edges.values()):
                input = pad_with_halos(input, self._comm, self._layout, edges.get(-2, Edge()), edges.get(-1, Edge()))
            return extend(function(input, weight, bias, strides, pads, dilations, groups), kept)

        return convolve

    def _check_aligned(self, function: Handler, height: int, width: int, strides: list[int]) -> None:
        for dim in (-2, -1):
            shards = self._layout.extents(dim, height, width)[:-1]
            if any(rows % strides[dim] for rows in shards):
                raise UnsupportedError(
                    f"{function.__name__} with stride {strides[dim]} does not divide shards of {shards} rows"
                )

    def pointwise_convolution(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`torch.conv1d` over time is local, over positions only with a kernel of one."""
        if weight.shape[-1] != 1 and not along_time(self._layout, input.shape[0], input.shape[-1]):
            raise UnsupportedError(f"conv1d with a kernel of {weight.shape[-1]} is not known on a shard")
        return torch.conv1d(input, weight, *args, **kwargs)

    def group_norm(
        self,
        input: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ) -> torch.Tensor:
        """Statistics of all ranks, merged from each rank's count, mean and centred second moment in one collective.

        The merge is that of Chan, Golub and LeVeque (1979), in float32, or float64 for float64.
        """
        batch, channels = input.shape[:2]
        wide = torch.promote_types(input.dtype, torch.float32)
        rows = input.reshape(batch * num_groups, -1).to(wide)
        variance, mean = torch.var_mean(rows, dim=1, correction=0)
        count = torch.full_like(mean, rows.shape[1])
        counts, means, moments = self._comm.all_gather(torch.stack([count, mean, variance * count])).unbind(1)
        total = counts.sum(0)
        merged = (counts * means).sum(0) / total
        spread = (moments + counts * (means - merged) ** 2).sum(0) / total
        per_channel = channels // num_groups
        normal = F.batch_norm(
            input.reshape(1, batch * channels, *input.shape[2:]),
            merged.repeat_interleave(per_channel),
            spread.repeat_interleave(per_channel),
            None if weight is None else weight.to(wide).repeat(batch),
            None if bias is None else bias.to(wide).repeat(batch),
            False,
            0.0,
            eps,
        )
        return normal.view(input.shape)

    def batch_norm(self, input: torch.Tensor, mean: Any, variance: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """With given statistics it is local; its own would be those of a piece."""
        if mean is None or (args[2] if len(args) > 2 else kwargs.get("training", False)):
            raise UnsupportedError("batch_norm with statistics of its input is not known on a shard")
        return F.batch_norm(input, mean, variance, *args, **kwargs)

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queries stay; keys and values of all ranks come in one message to each."""
        mask = args[0] if args else kwargs.get("attn_mask")
        causal = args[2] if len(args) > 2 else kwargs.get("is_causal", False)
        if (mask is not None or causal) and along_time(self._layout, query.shape[0], key.shape[-2]):
            self.attention_calls += 1
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        if causal:
            raise UnsupportedError("attention whose mask orders the positions is not known on a shard")
        if args[1] if len(args) > 1 else kwargs.get("dropout_p", 0.0):
            raise UnsupportedError("attention with dropout is not known on a shard; call eval() on the autoencoder")
        sizes = self._layout.positions(key.shape[-2])
        if mask is not None:
            mask = frame_mask(self._layout, mask, key.shape[-2], sizes)
            args, kwargs = (mask, *args[1:]) if args else args, kwargs if args else kwargs | {"attn_mask": mask}
        self.attention_calls += 1
        both = torch.stack([key, value])
        shape = list(both.shape)
        unit = both.numel() // shape[-2]
        pieces = self._comm.all_gather_uneven(both.flatten(), [size * unit for size in sizes])
        whole = [piece.view(*shape[:-2], size, shape[-1]) for piece, size in zip(pieces, sizes, strict=True)]
        keys, values = torch.cat(whole, dim=-2)
        return F.scaled_dot_product_attention(query, keys, values, *args, **kwargs)

    def interpolate(
        self, input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", **kwargs: Any
    ) -> torch.Tensor:
        """Nearest interpolation by whole factors in height and width is local, and any in time alone."""
        dims = input.dim() - 2
        if size is None:
            factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * dims
        else:
            factors = [to / have for to, have in zip(each(size, dims), input.shape[2:], strict=True)]
        whole = dims > 1 and all(f is not None and float(f) == int(f) and f >= 1 for f in factors[-2:])
        if size is not None and factors[-2] != factors[-1]:  # a size that is not a piece's, but the whole map's
            whole = False
        still = dims > 2 and list(factors[-2:]) == [1, 1]
        if not still and (mode not in ("nearest", "nearest-exact") or not whole):
            raise UnsupportedError(f"F.interpolate with mode {mode!r}, size {size} and factor {scale_factor}")
        return F.interpolate(input, size, scale_factor, mode, **kwargs)

    def normalize_last(self, function: Handler) -> Handler:
        """Layer and RMS norms over channels are local; over rows or columns they are not known."""

        def normalize(input: torch.Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            over = set(range(input.dim() - len(normalized_shape), input.dim()))
            if len(normalized_shape) > 1 or over & self._layout.cut_dims(input):
                raise UnsupportedError(f"{function.__name__} over {len(normalized_shape)} dims needs other ranks' rows")
            return function(input, normalized_shape, *args, **kwargs)

        return normalize

    def _pool(self, function: Handler, indices: bool = False) -> Handler:
        name = "avg_pool2d" if function is F.avg_pool2d else "max_pool2d"
        last = ["padding"] if function is F.avg_pool2d else ["padding", "dilation"]
        plain = {"padding": [0, 0], "dilation": [1, 1]}

        def checked(input: torch.Tensor, kernel_size: Any, stride: Any = None, *args: Any, **kwargs: Any) -> Any:
            kernel = each(kernel_size, 2)
            given = dict(zip(last, args, strict=False)) | kwargs
            other = any(each(given[key], 2) != value for key, value in plain.items() if key in given)
            other = other or (each(stride, 2) if stride else kernel) != kernel
            if indices or other or any(input.shape[d] % k for d, k in zip((-2, -1), kernel, strict=True)):
                raise UnsupportedError(f"{name} of {kernel} that is not cut where shards are is not known on a shard")
            return function(input, kernel_size, stride, *args, **kwargs)

        return checked


def _paddings(padding: Any, reach: list[int], dims: int) -> list[int]:
    if padding == "valid":
        return [0] * dims
    if padding == "same":
        if any(r % 2 == 0 for r in reach):
            raise UnsupportedError("a convolution with padding 'same' and an even reach is not known on a shard")
        return [(r - 1) // 2 for r in reach]
    return each(padding, dims)


def _edge(function: Handler, reach: int, stride: int, pad: int) -> Edge:
    """Rows that a convolution of ``reach`` and ``stride`` with ``pad`` needs from its neighbours.

    Raises:
        UnsupportedError: its output would not be cut where its input is.
    """
    _check_keeps(function, reach, stride, 2 * pad)
    return Edge(before=pad, after=max(0, reach - stride - pad), pad_before=pad, pad_after=pad)


def _check_ready(function: Handler, ready: Edge, reach: int, stride: int, pad: int) -> int:
    """Rows that `F.pad` has added on an inner piece for this convolution.

    Raises:
        UnsupportedError: they are not what it needs.
    """
    added = ready.before + ready.after
    if pad:
        raise UnsupportedError(f"{function.__name__} with padding {pad} on a sharded axis that is padded already")
    _check_keeps(function, reach, stride, added)
    return added


def _check_keeps(function: Handler, reach: int, stride: int, added: int) -> None:
    if not reach - stride <= added < max(reach, 1):
        raise UnsupportedError(
            f"{function.__name__} with a reach of {reach} and stride {stride} on {added} rows of padding changes the "
            "extent of a sharded axis"
        )
