# SPDX-License-Identifier: Apache-2.0
"""What the command and its rank processes say to each other, over one private pipe for each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import TileExtent
from .arms import Arm


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """An autoencoder that every rank makes alike.

    Attributes:
        class_name: The diffusers class.
        config: Its ``config.json``.
        model: Folder or hub name of the checkpoint with its weights; None: random ones, the same on every rank.
        subfolder: Where in the checkpoint.
    """

    class_name: str
    config: Mapping[str, Any]
    model: str | None = None
    subfolder: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One operation.

    Attributes:
        operation: ``encode`` or ``decode``.
        shape: Public input, ``(B, C, T, H, W)`` or ``(B, C, H, W)``.
        arms: What is compared; the first two are the baselines.
    """

    operation: str
    shape: tuple[int, ...]
    arms: tuple[Arm, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Command to rank, first and only.

    Attributes:
        source: What runs.
        works: Operations, one after the other.
        ranks: Processes.
        dtype: Name of the type of weights and input.
        tile_size, tile_stride: In pixels; None: the family's.
        chunk: Latent frames that a shard takes at a time; None: as it decides.
        warmup: Rounds before those that are timed. One is made in any case: its results are compared.
        repeats: Rounds that are timed; each runs every arm once.
        exact: Whether shards are judged, by a run in float64 on the first rank; tiles are in any case.
        timeout: Seconds that a rank waits for another.
    """

    source: Source
    works: tuple[Work, ...]
    ranks: int
    dtype: str
    tile_size: TileExtent | None
    tile_stride: TileExtent | None
    chunk: int | None
    warmup: int
    repeats: int
    exact: bool
    timeout: float


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Command to rank: the job, who this rank is, and the command's process."""

    job: Job
    rank: int
    init_method: str
    command: int


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Rank 0 to command: ``done`` of ``total`` steps are over, and what comes now."""

    done: int
    total: int
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """Rank to command: it cannot go on.

    Attributes:
        reason: Type and message.
        lost_peer: Whether it only lost another rank, which knows more.
    """

    reason: str
    lost_peer: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """How far a result is from another, of values as the autoencoder gives them."""

    max: float
    mean: float


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How far a result is from those of one rank.

    Attributes:
        to_untiled, to_tiles: From the whole at once, and from diffusers' own tiles.
        against: What it is promised to equal: ``untiled``, ``tiles``, or the same ``pieces`` on one rank; None where
            that is not judged.
        error, limit: What it is promised by: the error as the promise counts it, and how large that may be.
    """

    to_untiled: Difference
    to_tiles: Difference
    against: str | None = None
    error: float = 0.0
    limit: float = 0.0

    @property
    def broken(self) -> bool:
        """Whether the promise is not kept; a value that is no number keeps none."""
        return self.against is not None and not self.error <= self.limit

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        told = dataclasses.asdict(self)
        return told | {"promise": None if self.against is None else "broken" if self.broken else "holds"}


@dataclasses.dataclass(slots=True)
class ArmSeen:
    """What one rank saw of one arm.

    Attributes:
        wall_s, cpu_s: Seconds of each repeat; 0 where it had nothing to do.
        peak_bytes: Most bytes at one time: of tensors on the CPU, of the allocator on an accelerator; from the input
            on, without weights.
        input_bytes: Those of them that the input takes, which are there before the run.
        messages, bytes: Point-to-point messages of one run that it sent.
        broadcast_bytes: Bytes of results that it sent to all.
        reduced_bytes: Bytes that it brought to sums over the ranks.
        collectives: Collectives of one run by name.
        decision: What the autoencoder decided, JSON-ready; None on one rank.
        comparison: On rank 0, unless what comes out has no meaning.
    """

    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    input_bytes: int = 0
    messages: int = 0
    bytes: int = 0
    broadcast_bytes: int = 0
    reduced_bytes: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    decision: dict[str, Any] | None = None
    comparison: Comparison | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RankSeen:
    """Rank to command, last.

    Attributes:
        device: Where it ran.
        backend: By what ranks talked.
        threads: Compute threads.
        weight_bytes: Bytes of the autoencoder's weights.
        arms: By operation and arm.
    """

    device: str
    backend: str
    threads: int
    weight_bytes: int
    arms: dict[str, dict[str, ArmSeen]]


FromRank = Progress | Failed | RankSeen
