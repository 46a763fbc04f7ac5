# SPDX-License-Identifier: Apache-2.0
"""Every test that needs hardware or a server is in a step of a suite, and every step has the tests that it is for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ci.selection import Selected, collect, faults, needing_a_step
from tests.ci.steps import SUITES, Step, read_steps, uploaded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SELECTED = Sequence[Sequence[Selected]]


@pytest.fixture(scope="module")
def collected() -> tuple[list[Step], list[list[Selected]], Selected]:
    """The suites' steps, what each of their calls selects, and all tests."""
    steps = read_steps()
    calls = [call for step in steps for call in step.arguments]
    *answers, everything = collect([*calls, ["tests"]])
    rest = iter(answers)
    return steps, [[next(rest) for _ in step.arguments] for step in steps], everything


def test_steps_and_tests_fit_each_other(collected: tuple[list[Step], SELECTED, Selected]) -> None:
    assert faults(*collected) == []


def test_there_is_something_to_guard(collected: tuple[list[Step], SELECTED, Selected]) -> None:
    steps, _, everything = collected
    assert {"cpu", "cuda"} <= {step.platform for step in steps}
    assert {step.cards for step in steps if step.platform == "cuda"} == {1, 2, 4, 8}
    assert any("e2e" in marks for marks in everything.values())
    assert len(needing_a_step(everything)) < len(everything)


def test_every_suite_is_uploaded() -> None:
    files = {path.relative_to(SUITES).as_posix() for path in SUITES.rglob("*.yml")}
    assert uploaded() == files - {"pipeline.yml"}


def test_a_file_that_was_taken_out_of_its_steps_is_named(
    collected: tuple[list[Step], SELECTED, Selected],
) -> None:
    steps, selected, everything = collected
    file = "tests/e2e/online_serving/test_wan2_2.py"
    kept = [
        [{name: marks for name, marks in tests.items() if not name.startswith(file)} for tests in answers]
        for answers in selected
    ]
    found = [fault for fault in faults(steps, kept, everything) if fault.startswith("no step selects ")]
    assert found and all(fault.startswith(f"no step selects {file}::") for fault in found)


def test_a_step_that_selects_nothing_is_named(collected: tuple[list[Step], SELECTED, Selected]) -> None:
    steps, selected, everything = collected
    nothing = [
        [{} for _ in answers] if step is steps[0] else answers for step, answers in zip(steps, selected, strict=True)
    ]
    assert f"{steps[0]}: selects no test: pytest {' '.join(steps[0].arguments[0])}" in faults(
        steps, nothing, everything
    )


CUDA = Step("cuda/x.yml", "two", "cuda", "H100", 2, (("tests/a.py",),))


@pytest.mark.parametrize(
    ("step", "marks", "fault"),
    [
        (CUDA, {"e2e", "cuda", "H100", "cards_2"}, None),
        (CUDA, {"e2e", "cuda", "L4", "H100", "cards_2"}, None),
        (CUDA, {"e2e", "cuda", "H100", "cards_4"}, "needs 4 cards, its step has 2"),
        (CUDA, {"e2e", "cuda", "H100"}, "needs None cards, its step has 2"),
        (CUDA, {"e2e", "cuda", "H200", "cards_2"}, "needs H200, not H100"),
        (CUDA, {"e2e", "cpu", "cards_2"}, "is for cpu, not for cuda"),
        (CUDA, {"e2e"}, "is for no platform, not for cuda"),
        (dataclasses.replace(CUDA, platform="cpu", hardware="", cards=None), {"e2e", "cpu", "cards_2"}, None),
        (dataclasses.replace(CUDA, platform="cpu", hardware="", cards=None), {"vllm"}, None),
    ],
)
def test_a_test_in_the_wrong_step_is_named(step: Step, marks: set[str], fault: str | None) -> None:
    tests = {"tests/a.py::test_it": frozenset(marks)}
    expected = [] if fault is None else [f"cuda/x.yml: two: tests/a.py::test_it {fault}"]
    assert faults([step], [[tests]], tests) == expected


def test_marks_and_expressions_are_read_by_pytest_itself(tmp_path: Path) -> None:
    """A suite and tests of its own: one test in its step, one with a mark that no step asks for."""
    suites, tests = tmp_path / ".buildkite", tmp_path / "tests"
    suites.mkdir()
    tests.mkdir()
    (suites / "weekly.yml").write_text(
        "steps:\n"
        "  - label: two cards\n"
        '    commands: [make env, python -m pytest -v tests -m "cuda and cards_2"]\n'
        '    agents: {queue: cuda-h100, cards: "2"}\n'
    )
    (tests / "test_some.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.e2e\n@pytest.mark.cuda\n@pytest.mark.cards_2\ndef test_right():\n    pass\n\n"
        "@pytest.mark.e2e\n@pytest.mark.cuda\n@pytest.mark.cards_4\ndef test_left_out():\n    pass\n"
    )
    (step,) = read_steps(suites)
    assert step.arguments == (("-v", "tests", "-m", "cuda and cards_2"),)
    chosen, everything = collect([step.arguments[0], ["tests"]], tmp_path)
    assert faults([step], [[chosen]], everything) == ["no step selects tests/test_some.py::test_left_out"]
