# SPDX-License-Identifier: Apache-2.0
"""Run an autoencoder that is not shared, and once more in tiles where there is no memory for it in one piece."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..autoencoders import Decision, DistributedVaeMixin, Operation, Strategy, distributed_class, select_strategy
from ..autoencoders.shared_call import out_of_memory_in
from ..autoencoders.twin import switches
from ..config import VaeParallelMode
from ..distributed import Communicator, agree, give_back, is_out_of_memory
from ..errors import GeometryError, RankMemoryError, UnsupportedError

logger = logging.getLogger(__name__)


def run_unshared(
    vae: Any,
    operation: Operation,
    x: torch.Tensor,
    call: Callable[[Any], Any],
    callers: Communicator | None,
    told: Callable[[Decision], None],
) -> Any:
    """Collective over ``callers``, each of which makes the whole call by itself: all of them succeed, or none.

    One that runs out of memory un-tiled makes all of them run the call once more in tiles, with the tile size that is
    set; afterwards tiling is off as before. Not so for a class without a family, for an input that is not larger than a
    tile, and where the network draws random numbers.

    Args:
        vae: Of a diffusers class, or of its distributed class while that shares nothing.
        operation: What runs.
        x: The public method's input, the same on every rank.
        call: Makes the public call of the class that ``vae`` has then.
        callers: Ranks that call, or None for one.
        told: Told of the second run before it begins.

    Raises:
        RankError: a rank failed, with several that call; `RankMemoryError` if it was memory that it had not.
        Exception: what the call raised, with one.
    """
    try:
        return _together(callers, call, vae)
    except Exception as error:
        kind = distributed_class(vae)
        if kind is not None:
            kind.spec.reset(vae)
        retry = _in_tiles(vae, kind, operation, tuple(x.shape), error) if is_out_of_memory(error) else None
        if kind is None or retry is None:
            raise
    # The error is gone here, and with it what its traceback held.
    give_back(x.device)
    logger.warning("VAE %s", retry)
    told(retry)
    with _tiled(vae, kind):
        return _together(callers, call, vae)


def _together(callers: Communicator | None, call: Callable[[Any], Any], vae: Any) -> Any:
    if callers is None:
        return call(vae)
    result, error = None, None
    try:
        result = call(vae)
    except Exception as e:
        error = e
    agree(callers, error)
    return result


def _in_tiles(
    vae: Any, kind: type[DistributedVaeMixin] | None, operation: Operation, shape: tuple[int, ...], error: Exception
) -> Decision | None:
    """The decision to run a call once more, or None where that cannot help."""
    if kind is None or VaeParallelMode.TILE not in kind.spec.modes:
        return None
    spec = kind.spec
    if spec.is_tiled(vae, operation, shape) or spec.draws(vae, operation):
        return None
    try:
        with _tiled(vae, kind):
            if not spec.is_tiled(vae, operation, shape):
                return None
            grid = spec.grid(vae, operation, spec.seen_extents(vae, operation, shape))
    except (GeometryError, UnsupportedError):
        return None
    rank = error.rank if isinstance(error, RankMemoryError) else None
    whole = Decision(operation, Strategy.DIRECT, "tiling is switched off")
    reason = out_of_memory_in(whole, rank, str(error))
    return dataclasses.replace(select_strategy(operation, VaeParallelMode.TILE, grid, 1), fallback=True, reason=reason)


@contextlib.contextmanager
def _tiled(vae: Any, kind: type[DistributedVaeMixin]) -> Iterator[None]:
    """Within it ``vae`` tiles as one VAE rank that was started with tiling does."""
    before, base = switches(vae), type(vae)
    try:
        if kind.spec.mends_tiles:
            vae.__class__ = kind
            vae.mend_tiles()
        kind.spec.set_tiling(vae, None, None)
        yield
    finally:
        vae.__class__ = base
        for name in (*switches(vae), "_mends_tiles"):
            vars(vae).pop(name, None)
        vars(vae).update(before)
