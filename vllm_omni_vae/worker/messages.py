# SPDX-License-Identifier: Apache-2.0
"""What the engine and its ranks say to each other."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from ..config import EngineConfig
from ..pipelines.request import ComponentReport, GenerationRequest, GenerationResult, Stage, VaeUse


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Engine to rank, first: who you are and what to load.

    Attributes:
        config: What to load, and how.
        rank: Among the ranks that share the model.
        world_size: How many those are.
        init_method: Where they meet, as `torch.distributed.init_process_group` takes it.
        place: Number of this rank among those of its machine; its device is the one of that number.
    """

    config: EngineConfig
    rank: int
    world_size: int
    init_method: str
    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Engine to rank: make this clip. A rank that has only the VAE follows the leader through it."""

    job_id: str
    request: GenerationRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel:
    """Engine to rank: stop this job at the next chance. Ignored when the job is over."""

    job_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Engine to rank: leave."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """Rank to engine: loaded. Rank 0's components and device stand for all."""

    components: tuple[ComponentReport, ...]
    device: str
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailed:
    """Rank to engine: could not load; ``configuration`` when what was asked for is at fault."""

    message: str
    configuration: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StageProgress:
    """Rank 0 to engine: ``done`` of ``total`` units of a stage."""

    job_id: str
    stage: Stage
    done: int
    total: int


class Failure(StrEnum):
    """Why a rank did not finish a job."""

    CANCELLED = "cancelled"
    INVALID_OUTPUT = "invalid_output"
    OUT_OF_MEMORY = "out_of_memory"
    RANK_FAILED = "rank_failed"
    UNEXPECTED = "generation_failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """Rank to engine: the job is over here and this rank waits for the next message.

    Attributes:
        failure: None when it went well.
        message: Reason of the failure.
        result: The clip, on the output rank; what it tells of the ranks is empty.
        peak_memory_mb: Peak memory of this rank during the job, MiB.
        vae_use: What the autoencoders cost this rank.
        trace: Name of the trace that it wrote, or empty.
    """

    job_id: str
    failure: Failure | None = None
    message: str = ""
    result: GenerationResult | None = None
    peak_memory_mb: float = 0.0
    vae_use: tuple[VaeUse, ...] = ()
    trace: str = ""


ToRank = Setup | Run | Cancel | Stop
FromRank = Ready | LoadFailed | StageProgress | Finished
