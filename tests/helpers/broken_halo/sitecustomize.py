# SPDX-License-Identifier: Apache-2.0
"""Python imports this when it starts with this folder in PYTHONPATH: rank processes then have a broken halo."""

import sys
from pathlib import Path

if {"vllm_omni_vae.worker", "vllm_omni_vae.measure"} & set(sys.orig_argv):
    root = str(Path(__file__).resolve().parents[3])
    sys.path.append(root)
    try:
        from tests.helpers.broken_halo import break_halo
    finally:
        sys.path.remove(root)
    break_halo()
