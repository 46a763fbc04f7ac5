# SPDX-License-Identifier: Apache-2.0
"""At load the ranks try the strategies of their mode, and one that does not match serves nothing."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engines import Engines, ask, run
from tests.engine.processes import children, until
from tests.helpers.broken_halo import ENVIRONMENT
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError

pytestmark = pytest.mark.distributed

SHARD = "i2v, one map on two ranks"
FOLLOWER = "i2v, ulysses and a follower"


@pytest.fixture
def make(engines: Engines) -> Iterator[Any]:
    """Make an engine of a setup, with the self-test or without."""
    made: list[Engine] = []

    def make(name: str, *, selftest: bool = True) -> Engine:
        config = engines.config(name)
        vae = dataclasses.replace(config.vae, vae_selftest=selftest)
        made.append(Engine(dataclasses.replace(config, vae=vae)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def broken_halo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_a_shard_that_matches_is_reported_and_serves(make: Any) -> None:
    engine = make(SHARD)
    engine.start()
    (report,) = engine.report
    assert (report.parallel, report.detail) == (True, "spatial_shard_width on 2 ranks")
    number = r"\d\.\de[-+]\d\d"
    assert re.fullmatch(rf"4 checks, worst {number} of {number}", report.selftest)
    result = run(engine, ask(engine))
    assert [decision["strategy"] for decision in result.decisions] == 2 * ["spatial_shard_width"]


def test_ranks_that_hold_only_the_vae_take_part(make: Any) -> None:
    engine = make(FOLLOWER)
    engine.start()
    assert [report.selftest for report in engine.report] == ["2 checks, bit-equal"]
    assert run(engine, ask(engine)).frames.shape == (5, 64, 80, 3)


@pytest.mark.usefixtures("broken_halo")
def test_a_shard_that_does_not_match_ends_the_start(make: Any) -> None:
    engine, before = make(SHARD), children()
    with pytest.raises(ConfigurationError) as caught:
        engine.start()
    for operation in ("encode", "decode"):
        assert f"self-test of vae: {operation} with spatial_shard_width is off by " in str(caught.value)
    until(lambda: children() == before)
    assert engine.wait() is caught.value
    assert engine.health().reason == str(caught.value)
    assert engine.report == ()


@pytest.mark.usefixtures("broken_halo")
def test_switched_off_it_does_not_look(make: Any) -> None:
    engine = make(SHARD, selftest=False)
    engine.start()
    assert [report.selftest for report in engine.report] == [""]
