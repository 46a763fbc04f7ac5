# SPDX-License-Identifier: Apache-2.0
"""What every distributed autoencoder shares, on top of its unmodified diffusers class."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from ..config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from ..distributed import VaeGroups, agree_on
from ..errors import ConfigurationError
from ..geometry import TileGrid
from ..tiling import DistributedOperator, GridSpec, TileTask, merge_tiles
from .checks import check_merge, check_mode, check_splits, say_splits
from .deciding import decide
from .memory import agreed_budget
from .policy import Decision
from .shared_call import run_shared
from .spec import Between, CallOptions, FamilySpec, Operation, ignore, output_dtype
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
        splits: VaeSplits = IN_TILES,
    ) -> None:
        """Collective. Share the work among all ranks of ``group`` (default: the world)."""
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigurationError("init_distributed needs torch.distributed; call init_process_group first")
        size = dist.get_world_size(group) if isinstance(group, dist.ProcessGroup | None) else len(group)
        self.set_parallel_size(size, mode=mode, merge=merge, splits=splits, group=group)

    def set_parallel_size(
        self,
        size: int,
        *,
        mode: str | VaeParallelMode = VaeParallelMode.TILE,
        merge: str | VaeTileMerge = VaeTileMerge.BLEND,
        splits: VaeSplits = IN_TILES,
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
            splits: Which operations are split by rank instead of in tiles.
            group: Where these ranks are; see `VaeGroups.create`.
            output_rank: Rank within them that owns decoded samples.
            broadcast_result: Give decoded samples to every calling rank. Default: no.
            timeout: How long a rank waits for another. Default: torch's.

        Raises:
            ConfigurationError: a size below 1, an unknown mode or merge, or ranks that do not exist.
            UnsupportedError: a mode that the family does not have, tiles that it cannot sum, or a split that it cannot
                do.
        """
        mode, merge = VaeParallelMode.parse(mode), VaeTileMerge.parse(merge)
        check_mode(self.spec, mode)
        check_merge(type(self), merge)
        check_splits(self.spec, splits)
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
        state = ParallelState(groups, mode, bool(broadcast_result), placement, budget, merge, splits)
        self._vae_parallel = None if alone else state
        if not alone and VaeParallelMode.TILE in self.spec.modes and not self.use_tiling:
            self.enable_tiling()
            logger.info("VAE tiling is switched on: %d ranks share %s", len(groups.workers), self.spec.name)
        if not alone and state.is_output_rank:
            say_splits(self.spec, mode, splits)

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
        with self.operator(operation, x, arguments) as operator:
            tasks, grid = operator.split(x)
            return operator.merge({task.grid_coord: operator.exec(task) for task in tasks}, grid)

    def tile_split(self, z: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut latents into tiles whose output shapes are known beforehand."""
        return self.cut(z, Operation.DECODE)

    def tile_exec(self, task: TileTask, *, between: Between = ignore, **arguments: Any) -> torch.Tensor:
        """Decode one tile."""
        return self.spec.decode_tile(self, task.tensor, CallOptions(between=between, arguments=arguments))

    def tile_merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], grid_spec: GridSpec) -> torch.Tensor:
        """Blend decoded tiles and finish as un-tiled decode does."""
        return self.tile_finish(merge_tiles(tiles, grid_spec.grid), grid_spec)

    def tile_finish(self, merged: torch.Tensor, grid_spec: GridSpec) -> torch.Tensor:
        """Finish blended or summed tiles as un-tiled decode does."""
        return self.spec.finish_decode(self, merged)

    def encode_tile_split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut pixels into tiles whose output shapes are known beforehand."""
        return self.cut(x, Operation.ENCODE)

    def encode_tile_exec(self, task: TileTask, *, between: Between = ignore, **arguments: Any) -> torch.Tensor:
        """Encode one tile to moments."""
        return self.spec.encode_tile(self, task.tensor, CallOptions(between=between, arguments=arguments))

    def encode_tile_merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], grid_spec: GridSpec) -> torch.Tensor:
        """Blend the moments of all tiles."""
        return merge_tiles(tiles, grid_spec.grid)

    def to_json_string(self) -> str:
        """The configuration under the diffusers class's name, so that a saved model loads without this package."""
        config = json.loads(super().to_json_string())  # type: ignore[misc]
        config["_class_name"] = self.spec.base_class.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def cut(
        self, x: torch.Tensor, operation: Operation, grid: TileGrid | None = None
    ) -> tuple[list[TileTask], GridSpec]:
        """Tasks for every window of ``grid`` over ``x`` as the tiled function sees it; default: the tiles."""
        spec = self.spec
        grid = grid or spec.grid(self, operation, spec.extents(x.shape))
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
        return run_shared(self, state, operation, x, arguments)

    @contextlib.contextmanager
    def operator(
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
        self,
        state: ParallelState,
        operation: Operation,
        seen: tuple[int, int, int] | None,
        batch: int = 1,
        mode: VaeParallelMode | None = None,
    ) -> Decision:
        """The strategy for extents ``seen`` by the tiled function, None where diffusers does not tile.

        Args:
            state: How the work is shared.
            operation: What runs.
            seen: (T, H, W).
            batch: Items that the tiled function gets at once.
            mode: Another mode than the one that is set, and no split by rank.
        """
        return decide(self, state, operation, seen, batch, mode)

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
