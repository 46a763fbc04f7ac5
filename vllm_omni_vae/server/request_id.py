# SPDX-License-Identifier: Apache-2.0
"""The name of the request that is being answered."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID = "X-Request-Id"
"""The header that has it, from a client and in every answer."""

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Set by `RequestTracking`; the task of a job has that of the request which submitted it."""
