# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the model, told to clients beside its name."""

from __future__ import annotations

import dataclasses
from typing import Any

from .lifecycle import ServingEngine


def capabilities(engine: ServingEngine) -> dict[str, Any]:
    """Return JSON-ready facts about the model that ``engine`` serves, known also while it is being loaded.

    ``defaults`` are the model's own values, or the operator's; None where there is none, or where the pipeline knows.
    """
    card = engine.card
    defaults = dataclasses.asdict(card.defaults)
    given = engine.config.default_sampling_params
    return {
        "pipeline": card.pipeline_class,
        "medium": card.medium.value,
        "tasks": sorted(task.value for task in card.tasks),
        "takes": sorted(card.takes),
        "max_references": card.max_references,
        "transparency": card.transparency,
        "spatial_multiple": card.spatial_multiple,
        "spatial_minimum": card.spatial_minimum,
        "temporal_ratio": card.temporal_ratio,
        "fixed_steps": card.fixed_steps,
        "defaults": {name: given.get(name, value) for name, value in defaults.items()},
        "vae_ranks": engine.config.parallel.vae_patch_parallel_size,
    }
