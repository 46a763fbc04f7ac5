# SPDX-License-Identifier: Apache-2.0
"""Two runs of the installed vLLM, with this package's plugin and without it, over the same command lines."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Session = Mapping[str, Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that hold no more than what tells one kind from another, and of configuration files."""
    root = tmp_path_factory.mktemp("models")
    contents = {
        "llm/config.json": {"architectures": ["LlamaForCausalLM"]},
        "both/config.json": {"architectures": ["LlamaForCausalLM"]},
        "both/model_index.json": {"_class_name": "NobodysPipeline"},
        "wan/model_index.json": {"_class_name": "WanPipeline"},
        "nobodys/model_index.json": {"_class_name": "NobodysPipeline"},
        "llm.yaml": {"max-model-len": 512, "port": 8124},
        "wan.yaml": {
            "model": str(root / "wan"),
            "port": 8200,
            "vae_patch_parallel_size": 2,
            "vae-use-slicing": True,
            "default-sampling-params": {"num_inference_steps": 3},
        },
    }
    for name, content in contents.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def shared_commands(models: Path) -> dict[str, list[str]]:
    """Command lines that must come to the same with and without the plugin."""
    return {
        "llm": [
            "serve",
            "some/llm",
            "--max-model-len",
            "256",
            "--seed",
            "7",
            "--port",
            "8123",
            "--allowed-origins",
            '["a"]',
        ],
        "llm_folder": ["serve", str(models / "llm"), "--enforce-eager", "-tp", "2", "--served_model_name", "x", "y"],
        "llm_default": ["serve"],
        "llm_yaml": ["serve", str(models / "llm"), "--config", str(models / "llm.yaml"), "--port", "8125"],
        "llm_with_unknown_index": ["serve", str(models / "both")],
        "llm_unknown_flag": ["serve", "some/llm", "--no-such-flag"],
        "help": ["--help"],
        "bench_help": ["bench", "serve", "--help=all"],
        "run_batch_help": ["run-batch", "--help=all"],
        "launch_help": ["launch", "render", "--help=all"],
    }


@pytest.fixture(scope="session")
def run_session(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    """Run command lines in one new process; ``plugins`` names the ones that it may load."""

    def run(commands: Mapping[str, list[str]], plugins: str) -> Session:
        folder = tmp_path_factory.mktemp("session")
        probe = folder / "hook_probe-0.dist-info"
        probe.mkdir()
        (probe / "METADATA").write_text("Metadata-Version: 2.1\nName: hook-probe\nVersion: 0\n")
        (probe / "entry_points.txt").write_text("[vllm.general_plugins]\nhook_probe = hook_probe:register\n")
        (folder / "hook_probe.py").write_bytes((HERE / "hook_probe.py").read_bytes())
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {
            "COLUMNS": "1000",
            "PYTHONHASHSEED": "0",  # fixes the order in which sets are printed
            "PYTHONPATH": path,
            "VLLM_PLUGINS": plugins,
        }
        (folder / "commands.json").write_text(json.dumps(commands))
        done = subprocess.run(
            [sys.executable, HERE / "vllm_session.py", folder / "commands.json", folder / "outcomes.json"],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout
        return json.loads((folder / "outcomes.json").read_text())

    return run


@pytest.fixture(scope="session")
def without_plugin(run_session: Callable[..., Session], shared_commands: dict[str, list[str]]) -> Session:
    return run_session(shared_commands, "hook_probe")


@pytest.fixture(scope="session")
def with_plugin(run_session: Callable[..., Session], shared_commands: dict[str, list[str]], models: Path) -> Session:
    wan = str(models / "wan")
    ours = {
        "serve_help": ["serve", "--help=all"],
        "serve_group_help": ["serve", "--help=VaeConfig"],
        "serve_one_help": ["serve", "--help=vae-tile"],
        "ours_with_llm_folder": ["serve", str(models / "llm"), "--vae-use-tiling", "--vae_tile_size", "256x256"],
        "ours_with_llm_name": ["serve", "some/llm", "--no-vae-use-tiling"],
        "bare": ["serve", wan],
        "full": [
            *("serve", wan, "--vae-patch-parallel-size", "2", "--vae_parallel_mode", "spatial_shard_width"),
            *("--vae-tile-size", "256x320", "--flow-shift=5", "--usp", "2", "--use-hsdp", "--num-gpus", "4"),
            *("--dtype", "bfloat16", "--seed", "11", "--host", "127.0.0.1", "--port", "8123", "--api-key", "k1", "k2"),
            *("--served-model-name", "wan", "wan-alias", "--allowed-origins", '["https://a"]', "--max-pixels", "1000"),
            *("--disable-uvicorn-access-log", "--default-sampling-params", '{"num_inference_steps": 4}'),
            *("--allowed-media-domains", "A.example", "b.example"),
        ],
        "defaults_given": ["serve", wan, "--seed", "0", "--port", "8000", "--dtype", "auto"],
        "llm_flags": ["serve", wan, "--max-model-len", "256", "--gpu-memory-utilization", "0.5", "--port", "8123"],
        "model_flag": ["serve", "--model", wan, "--vae-use-tiling"],
        "yaml": ["serve", "--config", str(models / "wan.yaml"), "--port", "8300"],
        "unregistered": ["serve", str(models / "nobodys")],
        "unregistered_with_flag": ["serve", str(models / "both"), "--vae-use-tiling"],
        "bad_value": ["serve", wan, "--vae-tile-size", "wide"],
        "bad_combination": ["serve", wan, "--vae-patch-parallel-size", "2", "--no-vae-use-tiling"],
        "bad_shared_value": ["serve", wan, "--distributed-executor-backend", "uni"],
    }
    return run_session(shared_commands | ours, "vllm_omni_vae")
