# SPDX-License-Identifier: Apache-2.0
"""Does a strategy keep its promise here? One run on all ranks, beside what one rank makes of the same input."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from ..distributed import NullCommunicator, Traffic, VaeGroups, agree_on, fingerprint
from ..errors import GeometryError
from .policy import Decision, Strategy
from .spec import Operation
from .state import ParallelState
from .twin import tensor_in

_SEED = 0
_FLOAT64_LIMIT = 1e-12
_SLACK = 4.0
_SUM_EPSILONS = 8.0
_ROUNDING = 0.25
"""Root mean square error of rounding values to a type, in its epsilons, rounded up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How far a strategy is from what it promises to equal, and how far it may be. The same on every rank.

    Tiles must be those of one rank bit for bit, and pieces of a rank split those that one rank makes of the same pieces
    one after the other; how far pieces are from anything else is not promised. Summed, they may be off by eight
    epsilons of the largest value: that is what the order of the additions explains, and at most 1.6 were found on any
    grid, in any type. A shard must be as near to the exact result as the un-tiled run of one rank is, give or take a
    factor of four: both are compared with a run of the same weights on the same input in float64, by the root of the
    mean square of the difference over that of the exact result. This one rule judges every type and machine. A fixed
    limit to the un-tiled result could not: how much the order of a sum matters depends on the network's depth and
    weights and on kernels (convolutions of float32 may use TF32, on one rank too), so that it would refuse what is
    right or pass what is wrong. Of every family, shards were found at most 1.8 times as far off as un-tiled in float32
    and 1.3 times in half types, and with halos of zeros at least 4.8e5 and 29 times. Only float64 has nothing more
    exact to be compared with: its limit is 1e-12 of the largest value.

    Attributes:
        decision: What ran.
        shape: Shape of the public input.
        dtype: Of weights and input.
        max_difference, mean_difference: Of absolute values, to what the promise names: diffusers' own tiles one after
            the other on one rank for tiles (or ours, where its own are wrong), the same pieces on one rank for a rank
            split, its un-tiled result for anything else.
        scaled_difference: The largest difference over the largest value of that.
        error: What is judged: the scaled difference, or a shard's root mean square error against float64.
        limit: The most that `error` may be.
    """

    decision: Decision
    shape: tuple[int, ...]
    dtype: torch.dtype
    max_difference: float
    mean_difference: float
    scaled_difference: float
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; what is not a number keeps none."""
        return self.error <= self.limit


def compare(
    vae: Any,
    operation: Operation,
    shape: tuple[int, ...],
    mode: VaeParallelMode,
    arguments: Mapping[str, Any] | None = None,
    splits: VaeSplits = IN_TILES,
) -> Comparison:
    """Collective over all ranks that call ``vae``. Run ``mode`` on noise of ``shape`` and compare on the output rank.

    The ranks must be between jobs, and the autoencoder comes out as it went in. Its tile size and stride are used as
    they are set. On the output rank a copy of the autoencoder in float64 exists while a shard is judged.

    Args:
        vae: A distributed autoencoder.
        operation, shape: What to run, ``shape`` as the public method takes it.
        mode: How; the mode that is set is not looked at.
        arguments: Further arguments of the public method. Default: those that this autoencoder cannot do without.
        splits: Which operations are split by rank; those that are set are not looked at.

    Raises:
        RankError, DisagreementError: a rank failed, or ranks came to different results; on every rank alike.
    """
    state: ParallelState = vae.parallel_state
    groups = state.groups
    figures: list[float] = [0.0] * 5
    facts: dict[str, object] = {"decision": None, "result": None}
    error: Exception | None = None
    with left_alone(vae):
        trial = Trial(state, mode, splits)
        x = noise(operation, shape, vae)
        given = needed_arguments(vae, operation, x) if arguments is None else arguments
        try:
            vae._vae_parallel = trial
            result = run(vae, operation, x, given)
            (decision,) = trial.decisions
            everywhere = operation is Operation.ENCODE or state.broadcast_decode or decision.strategy is Strategy.DIRECT
            facts = {"decision": decision, "result": fingerprint(result) if everywhere else None}
            if state.is_output_rank:
                figures = _figures(vae, operation, x, given, decision, result)
        except Exception as e:
            error = e
        agree_on(groups.domain, facts, error)
        told = torch.tensor(figures, dtype=torch.float64, device=groups.domain.control_device)
        figures = groups.domain.all_gather(told)[groups.workers[groups.output]].tolist()
        return Comparison(decision, shape, x.dtype, *figures)


@contextlib.contextmanager
def left_alone(vae: Any) -> Iterator[None]:
    """Give a distributed autoencoder back as it was: attributes, the state of random numbers, counts of what was sent.

    No other call runs meanwhile, and nothing is noted for gradients.
    """
    state: ParallelState = vae.parallel_state
    device: torch.device = vae.device
    comms = [comm for comm in (state.groups.domain, state.groups.work, state.groups.halo) if comm is not None]
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with state.lock, torch.no_grad(), torch.random.fork_rng(**forked):
        attributes, traffic = dict(vars(vae)), [comm.traffic for comm in comms]
        for comm in comms:
            comm.traffic = Traffic()
        try:
            yield
        finally:
            vae.spec.reset(vae)
            vars(vae).clear()
            vars(vae).update(attributes)
            for comm, before in zip(comms, traffic, strict=True):
                comm.traffic = before


def noise(operation: Operation, shape: tuple[int, ...], vae: Any) -> torch.Tensor:
    """Pixels from -1 to 1, or normal latents, for ``vae``; the same on every rank and every kind of device."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
    if operation is Operation.ENCODE:
        x = x.mul_(0.5).clamp_(-1, 1)
    return x.to(vae.device, vae.dtype)


def needed_arguments(vae: Any, operation: Operation, x: torch.Tensor) -> dict[str, Any]:
    """Arguments without which ``vae`` does not run on ``x``, with values that are the same on every rank."""
    needed: Mapping[str, Any] = vae.spec.stand_ins(vae, operation, x)
    return {n: torch.full_like(v, 0.5) if isinstance(v, torch.Tensor) else v for n, v in needed.items()}


def run(vae: Any, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Moments or sample of ``x`` by the public method, with random numbers from a fixed seed."""
    torch.default_generator.manual_seed(_SEED)
    if x.device.type != "cpu":
        torch.get_device_module(x.device).manual_seed(_SEED)
    return tensor_in(getattr(vae, operation.value)(x, **arguments))


def run_alone(
    vae: Any, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any], *, tiled: bool
) -> torch.Tensor:
    """What diffusers makes of ``x`` on this rank, in tiles or not; communicates nothing. Within `left_alone`.

    Tiles that diffusers gets wrong are run here one after the other (see `FamilySpec.tiles_as_diffusers`).
    """
    vae._vae_parallel = None
    if not tiled:
        vae.spec.leave_whole(vae)
    elif not vae.spec.tiles_as_diffusers(vae, operation, tuple(x.shape)):
        vae._vae_parallel = _on_one_rank()
    made = run(vae, operation, x, arguments)
    return vae.spec.finish_tiles(vae, made) if tiled and operation is Operation.DECODE else made


def run_pieces_alone(
    vae: Any, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any], decision: Decision
) -> torch.Tensor:
    """What this rank makes of the pieces of ``decision``, one after the other. As `run_alone` otherwise."""
    vae._vae_parallel = _on_one_rank(VaeSplits(**{operation.value: decision.margin}), sum(decision.tiles_per_rank))
    return run(vae, operation, x, arguments)


def _on_one_rank(splits: VaeSplits = IN_TILES, pieces: int = 1) -> ParallelState:
    comm = NullCommunicator(0, 1)
    state = ParallelState(VaeGroups.over(comm), VaeParallelMode.TILE, False)
    alone = Trial(state, VaeParallelMode.TILE, splits)
    alone.pieces = pieces
    return alone


def run_exactly(vae: Any, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """`run_alone` without tiles, on a copy of the autoencoder in float64 that exists for this call alone."""
    vae._vae_parallel = None
    copied = torch.nn.Module.to(copy.deepcopy(vae), torch.float64)  # diffusers' own `to` writes a line for every cast
    wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in arguments.items()}
    with _Drawing(x.dtype):
        return run_alone(copied, operation, x.double(), wide, tiled=False)


class _Drawing(TorchFunctionMode):
    """Random numbers are drawn in ``dtype`` and then widened: in float64 a generator gives others."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.randn and kwargs.get("dtype") is torch.float64:
            return torch.randn(*args, **kwargs | {"dtype": self._dtype}).double()
        return func(*args, **kwargs)


class Trial(ParallelState):
    """The ranks and settings of another state in a mode of its own; decisions are kept and not logged."""

    def __init__(self, state: ParallelState, mode: VaeParallelMode, splits: VaeSplits = IN_TILES):
        super().__init__(state.groups, mode, state.broadcast_decode, merge=state.merge, splits=splits)
        self.chunk = state.chunk
        self.retry_in_tiles = False
        self.decisions: list[Decision] = []

    def note(self, decision: Decision) -> None:
        self.decisions.append(decision)


def _figures(
    vae: Any,
    operation: Operation,
    x: torch.Tensor,
    arguments: Mapping[str, Any],
    decision: Decision,
    result: torch.Tensor,
) -> list[float]:
    """The numbers of a `Comparison`, in their order."""
    if decision.strategy is Strategy.RANK_SPLIT:
        alone = run_pieces_alone(vae, operation, x, arguments, decision)
    else:
        alone = run_alone(vae, operation, x, arguments, tiled=decision.strategy is Strategy.TILE)
    if result.shape != alone.shape:
        raise GeometryError(
            f"{decision.strategy} makes {tuple(result.shape)} where one rank makes {tuple(alone.shape)}"
        )
    apart = (result.double() - alone.double()).abs()
    scaled = _over(float(apart.max()), float(alone.double().abs().max()))
    summed = decision.merge is VaeTileMerge.SUM
    exact = partial(run_exactly, vae, operation, x, arguments)
    error, limit = judge(result, alone, exact, sharded=decision.sharded, summed=summed)
    return [float(apart.max()), float(apart.mean()), scaled, error, limit]


def judge(
    result: torch.Tensor,
    alone: torch.Tensor,
    exact: Callable[[], torch.Tensor],
    *,
    sharded: bool,
    summed: bool = False,
) -> tuple[float, float]:
    """Error and limit of `Comparison`, which says why.

    Args:
        result: What the ranks made.
        alone: What the promise names, by `run_alone`.
        exact: Makes what `run_exactly` does; asked only where it is needed.
        sharded: Whether one feature map was spread over the ranks.
        summed: Whether tiles were summed.
    """
    scaled = _over(float((result.double() - alone.double()).abs().max()), float(alone.double().abs().max()))
    if not sharded:
        return scaled, _SUM_EPSILONS * torch.finfo(result.dtype).eps if summed else 0.0
    if result.dtype is torch.float64:
        return scaled, _FLOAT64_LIMIT
    reference = exact()
    error, own = (_over(_rms(made.double() - reference), _rms(reference)) for made in (result, alone))
    return error, _SLACK * max(own, _ROUNDING * torch.finfo(result.dtype).eps)


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _over(value: float, scale: float) -> float:
    return value / scale if scale else value
