# SPDX-License-Identifier: Apache-2.0
"""The components of a loaded pipeline behind another pipeline class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def assembled(kind: type, components: Mapping[str, Any], like: Any) -> Any:
    """A pipeline of class ``kind`` of ``components``, as quiet as the pipeline ``like``."""
    pipeline: Any = kind(**components)
    pipeline.set_progress_bar_config(**getattr(like, "_progress_bar_config", {}))
    return pipeline


def behind(pipeline: Any, kind: str, **settings: Any) -> Any:
    """The components of ``pipeline`` behind the diffusers class ``kind``; itself if it is one."""
    import diffusers

    wanted = getattr(diffusers, kind)
    return pipeline if isinstance(pipeline, wanted) else assembled(wanted, pipeline.components | settings, pipeline)
