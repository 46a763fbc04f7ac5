# SPDX-License-Identifier: Apache-2.0
"""`Omni` on ranks that torchrun started: every rank runs the same program, and rank 0 has the pixels of `mp`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import Engines, ask, run
from vllm_omni_vae import Omni
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.errors import ConfigurationError

PROGRAM = """
import json
import os
import sys

import numpy as np

from vllm_omni_vae import DiffusionParallelConfig, Omni
from vllm_omni_vae.errors import ConfigurationError, RequestError

model, out, fields = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rank = os.environ["RANK"]
parallel = DiffusionParallelConfig(vae_patch_parallel_size=2)
tiles = {"vae_use_tiling": True, "vae_tile_size": "32x32", "vae_tile_stride": "24x24", "vae_selftest": False}


def omni(**more):
    return Omni(model, parallel, distributed_executor_backend="external_launcher", **tiles, **more)


def refusal(call, kind):
    try:
        call()
    except kind as error:
        return str(error)


with omni() as first:
    clip = first.generate(**fields)
    heard = {
        "seed": refusal(lambda: first.generate(**fields | {"seed": None}), RequestError),
        "width": refusal(lambda: first.generate(**fields | {"width": 81}), RequestError),
    }
    again = first.generate(**fields)
heard["same"] = clip.frames.tobytes() == again.frames.tobytes()
heard["shape"] = clip.frames.shape
heard["use"] = [(use.rank, use.tiles) for use in clip.vae_use]
with omni(seed=fields.pop("seed")) as second:
    heard["second"] = second.generate(**fields).frames.tobytes() == clip.frames.tobytes()

import torch.distributed as dist

dist.init_process_group("gloo")
heard["initialized"] = refusal(omni, ConfigurationError)
dist.destroy_process_group()
np.save(f"{out}/{rank}.npy", clip.frames)
with open(f"{out}/{rank}.json", "w") as file:
    json.dump(heard, file)
"""


@pytest.mark.distributed
def test_two_ranks_of_torchrun_make_what_two_processes_make(
    engines: Engines, checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    model = checkpoints["wan2.2-t2v"]
    mp = engines["t2v on two ranks"]
    request = ask(mp)
    names = ("prompt", "width", "height", "num_frames", "num_inference_steps", "seed")
    fields = {name: getattr(request, name) for name in names}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        [*command, str(model), str(tmp_path), json.dumps(fields)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    leader, follower = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert np.array_equal(np.load(tmp_path / "0.npy"), run(mp, request).frames)
    assert np.load(tmp_path / "1.npy").shape == (0, 64, 80, 3), "the clip is rank 0's alone"
    assert leader["shape"] == [5, 64, 80, 3]
    assert leader["use"] == [[0, 6]] and follower["use"] == [[1, 6]], "each rank tells of itself"
    for heard in (leader, follower):
        assert heard["same"] and heard["second"]
        assert "every rank would draw another" in heard["seed"]
        assert "width" in heard["width"]
        assert "torch.distributed is initialized already" in heard["initialized"]


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(model="m", distributed_executor_backend="external_launcher", **fields)


def test_a_program_that_torchrun_did_not_start_is_refused(checkpoints: Mapping[str, Path]) -> None:
    with pytest.raises(ConfigurationError, match="torchrun did not start this process"):
        Omni(str(checkpoints["wan2.2-t2v"]), distributed_executor_backend="external_launcher")


def test_another_number_of_ranks_is_refused(checkpoints: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=2)
    with pytest.raises(ConfigurationError, match="torchrun started 3 ranks, but the parallelism needs 2"):
        Omni(str(checkpoints["wan2.2-t2v"]), parallel, distributed_executor_backend="external_launcher")


def test_replicas_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="start torchrun once for each"):
        config(parallel=DiffusionParallelConfig(data_parallel_size=2))
