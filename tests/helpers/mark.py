# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that need certain hardware: by them a CI queue picks its tests, and other machines skip them.

::

    @pytest.mark.parametrize("mode", [pytest.param("tile", marks=hardware_marks(res={"cuda": "H100"}, num_cards=2))])

has the marks ``cuda``, ``H100`` and ``cards_2``, so ``pytest -m "H100 and cards_2"`` selects it.
"""

import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import pytest

HARDWARE: Mapping[str, Mapping[str, int]] = {
    "cpu": {},
    "cuda": {"L4": 24, "A100": 80, "H100": 80, "H200": 141, "B200": 180},
    "rocm": {"MI300X": 192, "MI325X": 256},
}
"""Platform to its hardware, each with its memory in GB as sold."""

CARDS = (1, 2, 4, 8)

_USABLE = 0.9  # of the memory as sold, a driver reports at least this share


class Accelerators(NamedTuple):
    """What one machine has: a platform, how many devices of it, and the memory of each in GB."""

    platform: str
    cards: int
    memory_gb: float


def hardware_marks(res: Mapping[str, str | None], num_cards: int = 1) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that runs on ``num_cards`` devices of any of the platforms in ``res``.

    Args:
        res: Platform to the smallest hardware that has the memory, or to None where any will do.
        num_cards: Devices, one rank on each; on the platform ``cpu``, processes.

    Raises:
        ValueError: a platform, a hardware or a number of devices that is not known.
    """
    if not res:
        raise ValueError(f"res names no platform; choose from {', '.join(HARDWARE)}")
    if num_cards not in CARDS:
        raise ValueError(f"num_cards {num_cards} is not known; choose one of {', '.join(map(str, CARDS))}")
    names = []
    for platform, hardware in res.items():
        if platform not in HARDWARE:
            raise ValueError(f"platform {platform!r} is not known; choose from {', '.join(HARDWARE)}")
        names.append(platform)
        if hardware is not None:
            if hardware not in HARDWARE[platform]:
                known = ", ".join(HARDWARE[platform]) or "only None"
                raise ValueError(f"hardware {hardware!r} of platform {platform!r} is not known; choose from {known}")
            names.append(hardware)
    return [getattr(pytest.mark, name) for name in (*names, f"cards_{num_cards}")]


def unmet(names: Collection[str], here: Accelerators | None = None) -> str | None:
    """Say why a machine cannot run a test that has the marks ``names``; None when it can.

    Hardware is compared by its memory, so a test for one GPU also runs on a larger one.

    Args:
        names: All marks of the test.
        here: What the machine has; this machine is asked when it is left out and the answer depends on it.
    """
    platforms = [platform for platform in HARDWARE if platform in names]
    if not platforms or "cpu" in platforms:
        return None
    here = here or _accelerators()
    if here.platform not in platforms:
        return f"needs {' or '.join(platforms)}"
    cards = max((n for n in CARDS if f"cards_{n}" in names), default=1)
    if here.cards < cards:
        return f"needs {cards} devices, has {here.cards}"
    for hardware, memory_gb in HARDWARE[here.platform].items():
        if hardware in names and here.memory_gb < _USABLE * memory_gb:
            return f"needs the {memory_gb} GB of {hardware}, has {here.memory_gb:.0f} GB"
    return None


@functools.cache
def _accelerators() -> Accelerators:
    import torch

    if not torch.cuda.is_available():
        return Accelerators("cpu", 0, 0.0)
    platform = "rocm" if torch.version.hip else "cuda"
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return Accelerators(platform, torch.cuda.device_count(), memory / 1e9)
