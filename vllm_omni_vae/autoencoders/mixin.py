# SPDX-License-Identifier: Apache-2.0
"""What every distributed autoencoder shares, on top of its unmodified diffusers class."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from ..config import VaeParallelMode, VaeTileMerge
from ..distributed import VaeGroups, agree_on
from ..errors import ConfigurationError, UnsupportedError
from ..tiling import DistributedOperator, GridSpec, TileTask, merge_tiles
from .arguments import call_facts
from .memory import agreed_budget, within_budget
from .policy import Decision, select_strategy
from .sharded import run_sharded
from .spec import CallOptions, FamilySpec, Operation, output_dtype
from .state import ParallelState

if TYPE_CHECKING:
    import torch.distributed as dist


logger = logging.getLogger(__name__)


class DistributedVaeMixin:
    """Spreads the tiled encode and decode of a diffusers autoencoder over ranks.

    Put it before the diffusers class: ``class DistributedX(DistributedVaeMixin, X)`` with ``spec`` set. Until
    `set_parallel_size` is called with more than one rank, every method is diffusers' own; after `mend_tiles` but for
    tiles that diffusers gets wrong.

    Decoded samples belong to the output rank. On other ranks `decode` returns a placeholder: zeros with one frame, row
    and column, enough for the tail of a diffusers pipeline to run on. Moments from `encode` are whole on every rank.

    Inputs are ``(B, C, T, H, W)``, or ``(B, C, H, W)`` for a family of pictures. A family whose tiled functions take
    further arguments overrides `tiled_encode` and `tiled_decode` and passes them on by name.
    """

    spec: ClassVar[FamilySpec]
    _vae_parallel: ParallelState | None = None
    _mends_tiles: bool = False

    if TYPE_CHECKING:
        config: Any
        dtype: torch.dtype
        device: torch.device
        use_tiling: bool

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as the diffusers class does; parallel once `set_parallel_size` is called."""
        return super().from_pretrained(*args, **kwargs)  # type: ignore[misc]

    def init_distributed(
        self,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        *,
        mode: str | VaeParallelMode = VaeParallelMode.TILE,
        merge: str | VaeTileMerge = VaeTileMerge.BLEND,
    ) -> None:
        """Collective. Share the work among all ranks of ``group`` (default: the world)."""
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigurationError("init_distributed needs torch.distributed; call init_process_group first")
        size = dist.get_world_size(group) if isinstance(group, dist.ProcessGroup | None) else len(group)
        self.set_parallel_size(size, mode=mode, merge=merge, group=group)

    def set_parallel_size(
        self,
        size: int,
        *,
        mode: str | VaeParallelMode = VaeParallelMode.TILE,
        merge: str | VaeTileMerge = VaeTileMerge.BLEND,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        output_rank: int = 0,
        broadcast_result: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Collective over the calling ranks. Share encode and decode among ``size`` ranks, or stop sharing with 1.

        Sharing works in tiles or instead of them, so it switches diffusers' tiling on.

        Args:
            size: Ranks that share the work.
            mode: A `VaeParallelMode` or its text.
            merge: A `VaeTileMerge` or its text: how tiles become one result.
            group: Where these ranks are; see `VaeGroups.create`.
            output_rank: Rank within them that owns decoded samples.
            broadcast_result: Give decoded samples to every calling rank. Default: no.
            timeout: How long a rank waits for another. Default: torch's.

        Raises:
            ConfigurationError: a size below 1, an unknown mode or merge, or ranks that do not exist.
            UnsupportedError: a mode that the family does not have, or tiles that it cannot sum.
        """
        mode, merge = VaeParallelMode.parse(mode), VaeTileMerge.parse(merge)
        check_mode(self.spec, mode)
        check_merge(type(self), merge)
        if size < 1:
            raise ConfigurationError(f"VAE parallel size is {size}; it counts ranks and must be at least 1")
        if size == 1:
            self._vae_parallel = None
            return
        self.spec.check_tiling(self)
        placement = (size, group if group is None or hasattr(group, "size") else tuple(group), output_rank)
        before = self._vae_parallel
        same = before is not None and before.placement == placement
        if before is not None and same:
            groups, budget = before.groups, before.budget
        else:
            groups = VaeGroups.create(size, group, output_rank, timeout)
            budget = agreed_budget(groups, self.device)
        alone = len(groups.workers) == 1
        state = ParallelState(groups, mode, bool(broadcast_result), placement, budget, merge)
        self._vae_parallel = None if alone else state
        if not alone and VaeParallelMode.TILE in self.spec.modes and not self.use_tiling:
            self.enable_tiling()
            logger.info("VAE tiling is switched on: %d ranks share %s", len(groups.workers), self.spec.name)

    def is_distributed_enabled(self) -> bool:
        """Whether encode and decode are shared among ranks."""
        return self._vae_parallel is not None

    @property
    def parallel_state(self) -> ParallelState | None:
        """Groups, executor and hooks while the work is shared; else None."""
        return self._vae_parallel

    def enable_tiling(self, *args: Any, **kwargs: Any) -> None:
        """As diffusers, but a geometry that would leave gaps or shift the picture is refused and nothing is changed.

        Raises:
            GeometryError: what is wrong with the size and stride.
        """
        before = dict(self.__dict__)
        try:
            super().enable_tiling(*args, **kwargs)  # type: ignore[misc]
            self.spec.check_tiling(self)
        except Exception:
            self.__dict__.update(before)
            raise

    def encode(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Collective when distributed. Moments of pixels, whole on every rank; arguments as in diffusers."""
        with self._one_call(Operation.ENCODE, x, args, kwargs):
            return super().encode(x, *args, **kwargs)  # type: ignore[misc]

    def decode(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Collective when distributed. Sample of latents, on the output rank (see the class)."""
        with self._one_call(Operation.DECODE, z, args, kwargs):
            return super().decode(z, *args, **kwargs)  # type: ignore[misc]

    def tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        """Collective when distributed. Bit-equal to diffusers' sequential tiles; the result is on every rank.

        Where tiles are summed (`VaeTileMerge`) they are equal to those up to the order of additions.
        """
        if self._vae_parallel is None:
            return super().tiled_encode(x)  # type: ignore[misc]
        return self.encode_shared(x)

    def tiled_decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        """Collective when distributed. As `tiled_encode`, but the result is on the output rank."""
        if self._vae_parallel is None:
            return super().tiled_decode(z, return_dict=return_dict)  # type: ignore[misc]
        sample = self.decode_shared(z)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def encode_shared(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Collective; only when distributed. Moments of what the tiled function sees, on every rank.

        Args:
            x: Pixels as the tiled function sees them.
            arguments: Further arguments of the tiled function, by name.
        """
        moments = self._execute(Operation.ENCODE, x, arguments)
        assert moments is not None
        return moments

    def decode_shared(self, z: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Collective; only when distributed. The sample on its owner, a placeholder elsewhere; see `encode_shared`."""
        sample = self._execute(Operation.DECODE, z, arguments)
        if sample is None:
            small = self.spec.shape(z.shape[0], self.spec.channels(self, Operation.DECODE), (1, 1, 1))
            shape = self.spec.finished_shape(self, small)
            sample = z.new_zeros(self.spec.shape(shape[0], shape[1], (1, 1, 1)))
        return sample

    def mend_tiles(self) -> None:
        """Run tiles of this class on one rank too, where diffusers fails or gets its own wrong."""
        self._mends_tiles = True

    def mends(self, operation: Operation, x: torch.Tensor) -> bool:
        """Whether one rank runs tiles of this class on ``x``, as the public method takes it."""
        return self._mends_tiles and not self.spec.tiles_as_diffusers(self, operation, tuple(x.shape))

    def run_tiles_alone(self, operation: Operation, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What `encode_shared` and `decode_shared` make of ``x``, on this rank and without communication."""
        with self._operator(operation, x, arguments) as operator:
            tasks, grid = operator.split(x)
            return operator.merge({task.grid_coord: operator.exec(task) for task in tasks}, grid)

    def tile_split(self, z: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut latents into tiles whose output shapes are known beforehand."""
        return self._split(z, Operation.DECODE)

    def tile_exec(self, task: TileTask, **arguments: Any) -> torch.Tensor:
        """Decode one tile."""
        return self.spec.decode_tile(self, task.tensor, CallOptions(arguments=arguments))

    def tile_merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], grid_spec: GridSpec) -> torch.Tensor:
        """Blend decoded tiles and finish as un-tiled decode does."""
        return self.tile_finish(merge_tiles(tiles, grid_spec.grid), grid_spec)

    def tile_finish(self, merged: torch.Tensor, grid_spec: GridSpec) -> torch.Tensor:
        """Finish blended or summed tiles as un-tiled decode does."""
        return self.spec.finish_decode(self, merged)

    def encode_tile_split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut pixels into tiles whose output shapes are known beforehand."""
        return self._split(x, Operation.ENCODE)

    def encode_tile_exec(self, task: TileTask, **arguments: Any) -> torch.Tensor:
        """Encode one tile to moments."""
        return self.spec.encode_tile(self, task.tensor, CallOptions(arguments=arguments))

    def encode_tile_merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], grid_spec: GridSpec) -> torch.Tensor:
        """Blend the moments of all tiles."""
        return merge_tiles(tiles, grid_spec.grid)

    def to_json_string(self) -> str:
        """The configuration under the diffusers class's name, so that a saved model loads without this package."""
        config = json.loads(super().to_json_string())  # type: ignore[misc]
        config["_class_name"] = self.spec.base_class.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def _split(self, x: torch.Tensor, operation: Operation) -> tuple[list[TileTask], GridSpec]:
        spec = self.spec
        grid = spec.grid(self, operation, spec.extents(x.shape))
        batch, channels = x.shape[0], spec.channels(self, operation)
        tasks = []
        for tile_id, coord in enumerate(grid.coords()):
            cell = grid.cell(coord)
            time, height, width = (window.length for window in cell)
            shape = spec.shape(batch, channels, (time, height, width))
            tasks.append(TileTask(tile_id, coord, spec.cut(x, cell), grid.workload(coord), shape))
        return tasks, GridSpec(grid, output_dtype(x), spec.whole_shape(self, operation, tuple(x.shape)))

    def _execute(self, operation: Operation, x: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor | None:
        state = self._vae_parallel
        assert state is not None
        if state.rendezvous:
            x, arguments = state.rendezvous.announce(operation, x, arguments)
        broadcast = operation is Operation.ENCODE or state.broadcast_decode
        decision = self.decide(state, operation, self.spec.extents(x.shape), x.shape[0])
        draws = self.spec.draws(self, operation) and arguments.get("generator") is None
        facts = call_facts(operation.value, self.dtype, (), arguments, x.device if draws else None)
        if decision.sharded:
            options = CallOptions(decision.chunk, state.between, arguments)
            return run_sharded(
                state.groups, self.spec, self, operation, x, decision, broadcast=broadcast, facts=facts, options=options
            )
        with self._operator(operation, x, arguments) as operator:
            operator = dataclasses.replace(operator, merging=decision.merge)
            return state.executor.execute(x, operator, broadcast_result=broadcast, facts=lambda: facts)

    @contextlib.contextmanager
    def _operator(
        self, operation: Operation, x: torch.Tensor, arguments: dict[str, Any]
    ) -> Iterator[DistributedOperator]:
        """The tiled operation of one call, on every rank that calls; left when that call is over."""
        if operation is Operation.ENCODE:
            run = partial(self.encode_tile_exec, **arguments)
            yield DistributedOperator(self.encode_tile_split, run, self.encode_tile_merge)
        else:
            run = partial(self.tile_exec, **arguments)
            yield DistributedOperator(self.tile_split, run, self.tile_merge, finish=self.tile_finish)

    def decide(
        self, state: ParallelState, operation: Operation, seen: tuple[int, int, int] | None, batch: int = 1
    ) -> Decision:
        """The strategy for extents ``seen`` by the tiled function; None where diffusers does not tile."""
        if seen is None:
            untiled = "not larger than one tile" if self.use_tiling else "tiling is switched off"
            return select_strategy(operation, state.mode, None, state.size, untiled=untiled)
        tiles = self.spec.grid(self, operation, seen)

        def select(refusal: str = "") -> Decision:
            return select_strategy(
                operation,
                state.mode,
                tiles,
                state.size,
                latents=self.spec.latents(self, operation, seen[1:]),
                can_shard=VaeParallelMode.SPATIAL_SHARD_GRID in self.spec.modes,
                chunked=self.spec.chunked,
                refusal=refusal,
                thinnest=self.spec.least_latents(self, operation)[1:],
            )

        decision = select()
        if not decision.sharded:
            return self._with_merge(decision, state, seen, batch)
        if state.chunk is not None:
            return dataclasses.replace(decision, chunk=state.chunk)
        if state.budget is None:
            return decision
        shape = self.spec.seen_shape(self, operation, seen, batch)
        return within_budget(self, state, state.budget, decision, shape, select)

    def _with_merge(self, decision: Decision, state: ParallelState, seen: tuple[int, int, int], batch: int) -> Decision:
        if state.merge is VaeTileMerge.BLEND:
            return decision
        spec, operation = self.spec, decision.operation
        whole = spec.shape(batch, spec.channels(self, operation), spec.grid(self, operation, seen).out_extents)
        return dataclasses.replace(decision, merge=state.merge, sent_bytes=prod(whole) * self.dtype.itemsize)

    def _choose(
        self,
        state: ParallelState,
        operation: Operation,
        shape: tuple[int, ...],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Decision:
        """The strategy for a public call."""
        tiled = self.spec.is_tiled(self, operation, shape)
        seen = self.spec.seen_extents(self, operation, shape) if tiled else None
        return self.decide(state, operation, seen, 1 if getattr(self, "use_slicing", False) else shape[0])

    @contextlib.contextmanager
    def _one_call(
        self, operation: Operation, x: torch.Tensor, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Iterator[Decision | None]:
        """Hold the module for one call; when distributed, decide and check before anything runs."""
        self.spec.check_operation(operation)
        state = self._vae_parallel
        if state is None:
            yield None
            return
        with state.lock:
            shape = tuple(x.shape)
            callers = state.callers(operation)
            if callers is not None:
                agree_on(callers, state.request_facts(self, operation, x, args, kwargs or {}))
            self.spec.check(self, operation, shape)
            decision = self._choose(state, operation, shape, args, kwargs or {})
            state.note(decision)
            try:
                yield decision
            except BaseException:
                self.spec.reset(self)
                raise


def check_mode(spec: FamilySpec, mode: VaeParallelMode) -> None:
    """Refuse a mode that the family does not have.

    Raises:
        UnsupportedError: names the modes it has.
    """
    if mode not in spec.modes:
        raise UnsupportedError(
            f"{spec.name} cannot run vae_parallel_mode {mode.value}; "
            f"it has {', '.join(m for m in VaeParallelMode if m in spec.modes)}"
        )


def check_merge(kind: type[DistributedVaeMixin], merge: VaeTileMerge) -> None:
    """Refuse to sum tiles where that would leave out what ``kind`` does when it merges them.

    Raises:
        UnsupportedError: it has no tiles, or a merge of its own.
    """
    if merge is VaeTileMerge.BLEND:
        return
    if VaeParallelMode.TILE not in kind.spec.modes:
        raise UnsupportedError(
            f"{kind.spec.name} is not shared in tiles, so vae_tile_merge {merge} does nothing for it"
        )
    for name in ("tile_merge", "encode_tile_merge"):
        if getattr(kind, name) is not getattr(DistributedVaeMixin, name):
            raise UnsupportedError(
                f"{kind.__name__} merges tiles by its own {name}, which vae_tile_merge {merge} would not call; take "
                f"{VaeTileMerge.BLEND}"
            )
