# SPDX-License-Identifier: Apache-2.0
"""Servers by their command lines, on each hardware that is there; what a failed test shows of them."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mark import hardware_marks
from tests.helpers.server import START_SECONDS, Server
from vllm_omni_vae import tiny

REAL_START_SECONDS = 1800.0
NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "VLLM_TARGET_DEVICE": "cpu"}

Start = Callable[..., Server]
Checkpoint = Callable[[str], str]


CPU = pytest.param("cpu", marks=[*hardware_marks(res={"cpu": None}, num_cards=2), pytest.mark.timeout(300)])
_CARDS = hardware_marks(res={"cuda": "H100", "rocm": "MI300X"}, num_cards=2)
CUDA = pytest.param("cuda", marks=[*_CARDS, pytest.mark.timeout(3600)])


@pytest.fixture(scope="module", params=[CPU, CUDA])
def hardware(request: pytest.FixtureRequest) -> str:
    """What the ranks run on: two processes, or two GPUs."""
    return request.param


@pytest.fixture(scope="module")
def checkpoint(hardware: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The checkpoint of a family: a tiny one, or on GPUs the one that a variable names.

    The variable of ``wan2.2-i2v`` is ``VLLM_OMNI_VAE_TEST_WAN2_2_I2V``: a folder, or a name on the hub.
    """
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(family: str) -> str:
        variable = "VLLM_OMNI_VAE_TEST_" + "".join(c if c.isalnum() else "_" for c in family.upper())
        if hardware != "cpu" and os.environ.get(variable):
            return os.environ[variable]
        return str(tiny.build(family, folder / family))

    return find


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> str:
    """The checkpoint of the module's ``FAMILY``."""
    return checkpoint(request.module.FAMILY)


@pytest.fixture(scope="module")
def server(start: Start, model: str) -> Server:
    """Stock vLLM with two VAE ranks, in the tiles that are usual for ``model``."""
    server = start("vllm", "serve", model, "--vae-patch-parallel-size", "2")
    server.wait_until_healthy()
    return server


@pytest.fixture(scope="module")
def start(hardware: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server; those still running are asked to stop at the end, and must then leave nothing behind."""
    servers: list[Server] = []

    def begin(*command: str, environment: Mapping[str, str] | None = None) -> Server:
        folder = tmp_path_factory.mktemp("server")
        hidden = NO_ACCELERATOR if hardware == "cpu" else {}
        patience = START_SECONDS if hardware == "cpu" else REAL_START_SECONDS
        servers.append(Server(command, folder, environment={**hidden, **(environment or {})}, patience=patience))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            assert server.stop() == 0, server.log
        server.close()
        assert not left_media(server), server.log


def left_media(server: Server) -> list[Path]:
    """What a server has left in its folder for temporary files."""
    return sorted(server.temporary.glob("vllm-omni-vae-*"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the log of every server that a failed test used."""
    report: Any = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Server):
                report.sections.append((f"end of the log of {name}", value.log))
    return report
