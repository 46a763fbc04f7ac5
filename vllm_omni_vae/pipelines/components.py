# SPDX-License-Identifier: Apache-2.0
"""Find the autoencoders of a loaded pipeline, wherever they are, and distribute them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from ..autoencoders import distribute, distributed_class, selftest
from ..autoencoders.selftest import summary
from ..config import DiffusionParallelConfig, VaeConfig, VaeTileMerge
from ..errors import UnsupportedError
from .request import ComponentReport

logger = logging.getLogger(__name__)


def find_vaes(pipeline: Any) -> dict[str, Any]:
    """Every autoencoder reachable from ``pipeline`` through its components and through pipelines within, by path.

    The same module found twice is named once. An autoencoder is a module with both ``encode`` and ``decode``, or one of
    a known family.
    """
    found: dict[int, tuple[str, Any]] = {}
    for path, part in _walk("", pipeline, set()):
        found.setdefault(id(part), (path, part))
    return dict(found.values())


def repeated(pipeline: Any, reports: Sequence[ComponentReport]) -> list[ComponentReport]:
    """A report for every further path to an autoencoder that `find_vaes` names once, from ``reports`` on those."""
    names = {id(vae): path for path, vae in find_vaes(pipeline).items()}
    by_path = {report.path: report for report in reports}
    found = [(path, by_path.get(names[id(part)])) for path, part in _walk("", pipeline, set())]
    return [
        dataclasses.replace(report, path=path, detail=f"the same as {report.path}", selftest="")
        for path, report in found
        if report is not None and report.path != path
    ]


def _walk(prefix: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    parts = dict(getattr(owner, "components", {})) | {k: v for k, v in vars(owner).items() if not k.startswith("_")}
    for name, part in parts.items():
        if distributed_class(part) or (_is_module(part) and hasattr(part, "encode") and hasattr(part, "decode")):
            yield prefix + name, part
        elif hasattr(part, "components"):
            yield from _walk(f"{prefix}{name}.", part, seen)


def _is_module(part: Any) -> bool:
    import torch

    return isinstance(part, torch.nn.Module)


def set_up_vae(vae: Any, config: VaeConfig, parallel: DiffusionParallelConfig) -> None:
    """Apply the operator's tiling, slicing and tile geometry to one autoencoder.

    One of no known family gets those switches that it has; what it has not is said in a warning.

    Raises:
        GeometryError: the tile size and stride cannot be used.
        UnsupportedError: a tile length in time for a family that is not tiled in time.
    """
    if config.vae_use_slicing:
        _switch_on(vae, "enable_slicing", "--vae-use-slicing")
    family = distributed_class(vae)
    if family is None:
        if config.vae_use_tiling:
            _switch_on(vae, "enable_tiling", "--vae-use-tiling")
        return
    if config.vae_use_tiling or (parallel.vae_ranks > 1 and config.vae_use_tiling is None):
        family.spec.set_tiling(vae, config.vae_tile_size, config.vae_tile_stride)


def _switch_on(vae: Any, method: str, flag: str) -> None:
    with contextlib.suppress(NotImplementedError):
        if hasattr(vae, method):
            getattr(vae, method)()
            return
    logger.warning("%s does nothing for %s, which has no %s", flag, type(vae).__name__, method)


def self_test(vaes: dict[str, Any], reports: Sequence[ComponentReport]) -> list[ComponentReport]:
    """Collective. Check every autoencoder of ``vaes`` that is shared, before any call is made.

    Args:
        vaes, reports: As `distribute_vaes` left and returned them.

    Returns:
        The reports, with what was found.

    Raises:
        SelfTestError: a way of sharing does not give what it promises; on every rank alike.
    """
    return [
        dataclasses.replace(report, selftest=summary(selftest(vaes[report.path], report.path)))
        if report.parallel
        else report
        for report in reports
    ]


def distribute_vaes(
    vaes: dict[str, Any], config: VaeConfig, parallel: DiffusionParallelConfig, timeout: timedelta | None = None
) -> list[ComponentReport]:
    """Collective. Set up and share every autoencoder of ``vaes`` that can be shared.

    Returns:
        One report per autoencoder, in order.

    Raises:
        UnsupportedError: sharing was asked for and none of them can be.
    """
    reports = []
    for path, vae in vaes.items():
        kind = type(vae).__name__
        family = distributed_class(vae)
        set_up_vae(vae, config, parallel)
        if parallel.vae_ranks == 1:
            if config.vae_use_tiling and family is not None and family.spec.mends_tiles:
                vae.__class__ = family
                vae.mend_tiles()
            reports.append(ComponentReport(path, kind, False, "one VAE rank"))
        elif family is None:
            reports.append(ComponentReport(path, kind, False, f"no distributed class for {kind}"))
        else:
            mode, merge = parallel.vae_parallel_mode, parallel.vae_tile_merge
            splits = parallel.vae_splits
            distribute(vae, size=parallel.vae_ranks, mode=mode, merge=merge, splits=splits, timeout=timeout)
            summed = ", tiles summed" if merge is VaeTileMerge.SUM else ""
            margins = [(operation, splits.margin(operation)) for operation in family.spec.operations]
            split = "".join(f", {what} split by rank, margin {n}" for what, n in margins if n is not None)
            detail = f"{mode} on {parallel.vae_ranks} ranks{summed}{split}"
            reports.append(ComponentReport(path, kind, True, detail))
    if parallel.vae_ranks > 1 and not any(map(distributed_class, vaes.values())):
        why = "; ".join(f"{r.path}: {r.detail}" for r in reports) or "the pipeline has no autoencoder"
        raise UnsupportedError(
            f"--vae-patch-parallel-size {parallel.vae_patch_parallel_size} can do nothing here: {why}"
        )
    return reports
