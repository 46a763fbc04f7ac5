# SPDX-License-Identifier: Apache-2.0
"""The pipelines that can be served, by the class name in their ``model_index.json``."""

from __future__ import annotations

from .ltx2 import Ltx2Profile
from .profile import PipelineProfile
from .wan2_2 import WanProfile

PROFILES: tuple[PipelineProfile, ...] = (WanProfile(), Ltx2Profile())


def find_profile(pipeline_class: str) -> PipelineProfile | None:
    """The profile that serves ``pipeline_class``, or None."""
    return next((profile for profile in PROFILES if pipeline_class in profile.pipeline_classes), None)


def registered() -> tuple[str, ...]:
    """Every pipeline class that can be served."""
    return tuple(name for profile in PROFILES for name in profile.pipeline_classes)
