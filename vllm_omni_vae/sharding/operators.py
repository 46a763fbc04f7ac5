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
from .halo import Edge, pad_with_halos
from .layout import ShardLayout

Handler = Callable[..., Any]

_EXTENDED = "_vllm_omni_vae_extended"
"""Set on a tensor that `F.pad` extended, so that the convolution it is made for takes its halo as read."""


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
            F.layer_norm: self.normalize_last(F.layer_norm),
            F.rms_norm: self.normalize_last(F.rms_norm),
        }
        self.table |= {f: self._refuse(name) for name, f in _functions(_ALWAYS_REFUSED)}
        self.table |= {f: self._along_dims(f, name) for name, f in _functions(_REFUSED_ALONG)}
        self.table |= {f: self._pool(f, name) for name, f in _functions(_POOLS)}

    def pad(self, x: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> torch.Tensor:
        """Interior edges get the neighbour's rows, true edges the padding itself."""
        pad = list(pad)
        spatial, outer = (pad + [0] * 4)[:4], pad[4:]
        width, height = spatial[:2], spatial[2:]
        cut = [p for dim, p in ((-1, width), (-2, height)) if self._layout.sharded(dim)]
        if not any(any(p) for p in cut):
            return F.pad(x, pad, mode, value)
        if min(min(p) for p in cut) < 0:
            raise UnsupportedError(f"F.pad with {pad} cuts rows off a sharded axis")
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
        setattr(extended, _EXTENDED, True)
        return extended

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
            strides, dilations = _each(stride, dims), _each(dilation, dims)
            reach = [d * (k - 1) + 1 for d, k in zip(dilations, weight.shape[2:], strict=True)]
            pads = _paddings(padding, reach, dims)
            if getattr(input, _EXTENDED, False):
                return function(input, weight, bias, strides, pads, dilations, groups)
            edges = {}
            for dim in (-2, -1):
                if self._layout.sharded(dim):
                    edges[dim] = _edge(function, input.shape[dim], reach[dim], strides[dim], pads[dim])
                    pads[dim] = 0
            if any(edge != Edge() for edge in edges.values()):
                input = pad_with_halos(input, self._comm, self._layout, edges.get(-2, Edge()), edges.get(-1, Edge()))
            return function(input, weight, bias, strides, pads, dilations, groups)

        return convolve

    def pointwise_convolution(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`torch.conv1d` over positions is local only with a kernel of one."""
        if weight.shape[-1] != 1:
            raise UnsupportedError(f"conv1d with a kernel of {weight.shape[-1]} is not known on a shard")
        return torch.conv1d(input, weight, *args, **kwargs)

    def group_norm(
        self,
        input: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
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

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queries stay; keys and values of all ranks come in one message to each."""
        mask = args[0] if args else kwargs.get("attn_mask")
        causal = args[2] if len(args) > 2 else kwargs.get("is_causal", False)
        if mask is not None or causal:
            raise UnsupportedError("attention whose mask orders the positions is not known on a shard")
        sizes = self._layout.positions(key.shape[-2])
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
        """Nearest interpolation by whole factors is local; nothing else is."""
        factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor]
        whole = size is None and all(f is not None and float(f) == int(f) and f >= 1 for f in factors)
        if mode not in ("nearest", "nearest-exact") or not whole:
            raise UnsupportedError(f"F.interpolate with mode {mode!r}, size {size} and factor {scale_factor}")
        return F.interpolate(input, size, scale_factor, mode, **kwargs)

    def normalize_last(self, function: Handler) -> Handler:
        """Layer and RMS norms over channels are local; over rows or columns they are not known."""

        def normalize(input: torch.Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if len(normalized_shape) > 1:
                raise UnsupportedError(f"{function.__name__} over {len(normalized_shape)} dims needs other ranks' rows")
            return function(input, normalized_shape, *args, **kwargs)

        return normalize

    def _refuse(self, name: str) -> Handler:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(f"{name} is not known on a shard")

        return refuse

    def _along_dims(self, function: Handler, name: str) -> Handler:
        def checked(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs.get("input")
            spatial = self._layout.spatial_dims(x) if isinstance(x, torch.Tensor) else None
            if isinstance(x, torch.Tensor) and spatial is not None:
                cut = {dim for dim, axis in zip(spatial, (-2, -1), strict=True) if self._layout.sharded(axis)}
                if cut & _dims(args, kwargs, x.dim()):
                    raise UnsupportedError(f"{name} over a sharded axis of {tuple(x.shape)} is not known on a shard")
            return function(*args, **kwargs)

        return checked

    def _pool(self, function: Handler, name: str) -> Handler:
        def checked(
            input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
        ) -> Any:
            kernel = _each(kernel_size, 2)[-2:]
            steps = _each(stride, 2)[-2:] if stride else kernel
            inside = kernel == steps and not any(_each(padding, 2)[-2:])
            if not inside or any(input.shape[d] % k for d, k in zip((-2, -1), kernel, strict=True)):
                raise UnsupportedError(f"{name} with kernel {kernel} and stride {steps} straddles the edge of a shard")
            return function(input, kernel_size, stride, padding, *args, **kwargs)

        return checked


_ALWAYS_REFUSED = [
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool3d",
    "lp_pool2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "grid_sample",
    "unfold",
    "fold",
    "instance_norm",
    "rot90",
    "nonzero",
    "multi_head_attention_forward",
]
_REFUSED_ALONG = [
    "mean",
    "sum",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "amax",
    "amin",
    "max",
    "min",
    "prod",
    "norm",
    "argmax",
    "argmin",
    "logsumexp",
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "sort",
    "topk",
    "median",
    "flip",
    "roll",
]
_POOLS = ["avg_pool2d", "max_pool2d"]


def _functions(names: list[str]) -> list[tuple[str, Any]]:
    """Every callable of torch, its tensors and its functional module that goes by one of ``names``."""
    homes = (torch, torch.Tensor, F)
    return [(name, getattr(home, name)) for name in names for home in homes if hasattr(home, name)]


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> set[int]:
    given = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) > 1 else None))
    if given is None:
        return set(range(count))
    listed = given if isinstance(given, (tuple, list)) else [given]
    return {d % count for d in listed if isinstance(d, int)}


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else (list(value) * dims if len(value) == 1 else list(value))


def _paddings(padding: Any, reach: list[int], dims: int) -> list[int]:
    if padding == "valid":
        return [0] * dims
    if padding == "same":
        if any(r % 2 == 0 for r in reach):
            raise UnsupportedError("a convolution with padding 'same' and an even reach is not known on a shard")
        return [(r - 1) // 2 for r in reach]
    return _each(padding, dims)


def _edge(function: Handler, local: int, reach: int, stride: int, pad: int) -> Edge:
    """Rows that a convolution of ``reach`` and ``stride`` with ``pad`` needs from its neighbours.

    Raises:
        UnsupportedError: its output would not be cut where its input is.
    """
    if not reach - stride <= 2 * pad < max(reach, 1):
        raise UnsupportedError(
            f"{function.__name__} with a reach of {reach}, stride {stride} and padding {pad} changes the extent of a "
            "sharded axis"
        )
    return Edge(before=pad, after=max(0, reach - stride - pad), pad_before=pad, pad_after=pad)
