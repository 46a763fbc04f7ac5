# SPDX-License-Identifier: Apache-2.0
"""Hardware marks name what a test needs, and a machine skips what it lacks."""

import pytest

from tests.helpers.mark import CARDS, HARDWARE, Accelerators, hardware_marks, unmet

TWO_H100 = Accelerators("cuda", 2, 85.0)


def names(marks: list[pytest.MarkDecorator]) -> list[str]:
    return [mark.name for mark in marks]


def test_marks_are_platform_hardware_and_cards() -> None:
    assert names(hardware_marks(res={"cuda": "H100"}, num_cards=2)) == ["cuda", "H100", "cards_2"]
    assert names(hardware_marks(res={"cpu": None})) == ["cpu", "cards_1"]
    assert names(hardware_marks(res={"cuda": "L4", "rocm": None}, num_cards=8)) == ["cuda", "L4", "rocm", "cards_8"]


@pytest.mark.parametrize(
    ("res", "num_cards", "reason"),
    [
        ({}, 1, "no platform"),
        ({"tpu": None}, 1, "'tpu' is not known; choose from cpu, cuda, rocm"),
        ({"cuda": "MI300X"}, 1, "'MI300X' of platform 'cuda' is not known; choose from L4"),
        ({"cpu": "H100"}, 1, "choose from only None"),
        ({"cuda": "H100"}, 3, "num_cards 3 is not known; choose one of 1, 2, 4, 8"),
    ],
)
def test_unknown_hardware_is_refused(res: dict[str, str | None], num_cards: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hardware_marks(res, num_cards)


def test_every_mark_is_registered(pytestconfig: pytest.Config) -> None:
    registered = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert registered >= {*HARDWARE, *(name for group in HARDWARE.values() for name in group)}
    assert registered >= {f"cards_{n}" for n in CARDS}


@pytest.mark.parametrize(
    ("marks", "here", "reason"),
    [
        ({"slow"}, TWO_H100, None),
        ({"cpu", "cards_2"}, Accelerators("cpu", 0, 0.0), None),
        ({"cuda", "H100", "cards_2"}, TWO_H100, None),
        ({"cuda", "L4", "cards_1"}, TWO_H100, None),
        ({"cuda", "L4", "cards_1"}, Accelerators("cuda", 1, 23.7), None),
        ({"cuda", "H200", "cards_1"}, TWO_H100, "needs the 141 GB of H200, has 85 GB"),
        ({"cuda", "H100", "cards_4"}, TWO_H100, "needs 4 devices, has 2"),
        ({"rocm", "cards_1"}, TWO_H100, "needs rocm"),
        ({"cuda", "rocm", "cards_1"}, Accelerators("cpu", 0, 0.0), "needs cuda or rocm"),
        ({"cuda", "H100", "rocm", "MI325X", "cards_1"}, TWO_H100, None),
    ],
)
def test_a_machine_skips_what_it_lacks(marks: set[str], here: Accelerators, reason: str | None) -> None:
    assert unmet(marks, here) == reason


@pytest.mark.cuda
@pytest.mark.cards_1
def test_this_one_runs_only_with_cuda() -> None:
    import torch

    assert torch.cuda.is_available()
