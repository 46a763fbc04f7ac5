# SPDX-License-Identifier: Apache-2.0
"""The only place that reads the process environment."""

from __future__ import annotations

import os


def log_level() -> str:
    """Level of this package's logger: ``VLLM_OMNI_VAE_LOG_LEVEL``, else vLLM's ``VLLM_LOGGING_LEVEL``, else INFO."""
    return os.environ.get("VLLM_OMNI_VAE_LOG_LEVEL") or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO"


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a rank process: this one's, and settings that the user may override.

    Args:
        threads: Compute threads of one rank on the CPU.
    """
    return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ)
