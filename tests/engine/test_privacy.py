# SPDX-License-Identifier: Apache-2.0
"""Who can reach a rank: its engine, over a pipe without a name, and other ranks of this machine."""

import psutil
import pytest

from tests.engine.engines import Engines

pytestmark = pytest.mark.distributed


def test_ranks_are_reached_over_nameless_pipes_and_the_loopback_alone(engines: Engines) -> None:
    engine = engines["t2v on two ranks"]
    assert len(engine.worker_pids) == 2
    for pid in engine.worker_pids:
        process = psutil.Process(pid)
        named = [one.laddr for one in process.net_connections("unix") if one.laddr]
        assert named == []
        reached = {one.laddr.ip for one in process.net_connections("inet") if one.status != psutil.CONN_ESTABLISHED}
        assert reached <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
