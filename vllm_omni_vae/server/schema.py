# SPDX-License-Identifier: Apache-2.0
"""What the API's description says of bodies that are read by hand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_of(form: type[BaseModel], *media_types: str) -> dict[str, Any]:
    """Describe a body that holds the fields of ``form`` and is sent as any of ``media_types``."""
    schema = form.model_json_schema()
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in media_types}}}
