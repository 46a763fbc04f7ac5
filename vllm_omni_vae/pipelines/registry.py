# SPDX-License-Identifier: Apache-2.0
"""The pipelines that can be served, by their class names."""

from __future__ import annotations

from .flux2 import Flux2KleinProfile, Flux2Profile
from .ltx2 import Ltx2Profile
from .ltx2_two_stage import Ltx2TwoStageProfile
from .profile import PipelineProfile
from .qwen_image import (
    QwenImageEditPlusProfile,
    QwenImageEditProfile,
    QwenImageLayeredProfile,
    QwenImageProfile,
)
from .wan2_2 import WanProfile
from .z_image import ZImageProfile

PROFILES: tuple[PipelineProfile, ...] = (
    WanProfile(),
    Ltx2Profile(),
    Ltx2TwoStageProfile(),
    QwenImageProfile(),
    QwenImageEditProfile(),
    QwenImageEditPlusProfile(),
    QwenImageLayeredProfile(),
    ZImageProfile(),
    Flux2Profile(),
    Flux2KleinProfile(),
)


def find_profile(pipeline_class: str) -> PipelineProfile | None:
    """The profile that serves ``pipeline_class``, or None."""
    return next((profile for profile in PROFILES if pipeline_class in profile.pipeline_classes), None)


def registered() -> tuple[str, ...]:
    """Every pipeline class whose checkpoints can be served."""
    return tuple(name for profile in PROFILES for name in profile.pipeline_classes if profile.fits(name, name))


def classes_for(found: str) -> tuple[str, ...]:
    """Every class that a checkpoint whose index names ``found`` can be run as."""
    return tuple(name for profile in PROFILES for name in profile.pipeline_classes if profile.fits(name, found))
