# SPDX-License-Identifier: Apache-2.0
"""A halo that is broken on purpose: where the neighbour's rows belong, there are zeros. Nothing of it ships.

`break_halo` breaks this process. `ENVIRONMENT` breaks the rank processes of whatever is started with it: Python then
imports the file ``sitecustomize.py`` of this folder, which calls `break_halo` in ranks alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_omni_vae.distributed import Communicator
from vllm_omni_vae.sharding import halo

_FOLDERS = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, _FOLDERS))}


class _Zeros:
    """Exchanges as ``comm`` does and then forgets what came."""

    def __init__(self, comm: Communicator):
        self._comm = comm

    def exchange(self, sends: Sequence[Any], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._comm.exchange(sends, receives)
        for _, rows in receives:
            rows.zero_()


class BrokenFill:
    """Stands in for `halo._fill`."""

    def __init__(self, fill: Any):
        self._fill = fill

    def __call__(self, body: torch.Tensor, comm: Communicator, *args: Any) -> None:
        self._fill(body, _Zeros(comm), *args)


def break_halo() -> None:
    """Break the halo of this process for good."""
    setattr(halo, "_fill", BrokenFill(halo._fill))  # noqa: B010
