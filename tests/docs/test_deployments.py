# SPDX-License-Identifier: Apache-2.0
"""The files for several machines: valid YAML, whose commands our parser and Ray's take, and whose sizes fit."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.markdown import ROOT
from tests.docs.test_pages import RAY_FLAGS
from vllm_omni_vae.cli import serve
from vllm_omni_vae.config import EngineConfig
from vllm_omni_vae.config.flags import engine_config

FOLDER = ROOT / "examples" / "online_serving"
FILES = ("compose.yaml", "kubernetes.yaml")


def documents(name: str) -> list[dict[str, Any]]:
    """The mappings of a file, one for each of its documents."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def lists_of_words(value: Any) -> Iterator[list[str]]:
    """Every ``command`` within ``value``, a shell's script divided into its commands."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "command":
            words = shlex.split(inner[2]) if inner[:2] == ["sh", "-c"] else inner
            while "&&" in words:
                end = words.index("&&")
                yield words[:end]
                words = words[end + 1 :]
            yield words[1:] if words[0] == "exec" else words
        elif isinstance(inner, (dict, list)):
            yield from lists_of_words(inner)


def served(name: str) -> EngineConfig:
    """What the one server of a file is started with."""
    (words,) = [words for words in lists_of_words(documents(name)) if words[0] == "vllm-omni-vae"]
    parsers = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(parsers)
    assert words[1] == "serve"
    given = vars(parsers.choices["serve"].parse_args(words[2:]))
    return engine_config(given.pop("model"), given)


@pytest.mark.parametrize("name", FILES)
def test_a_server_with_ranks_in_ray(name: str) -> None:
    config = served(name)
    assert config.distributed_executor_backend == "ray"
    assert config.parallel.world_size == 2


@pytest.mark.parametrize("name", FILES)
def test_every_node_starts_ray_and_one_is_the_head(name: str) -> None:
    nodes = [words for words in lists_of_words(documents(name)) if words[0] == "ray"]
    assert len(nodes) == 2
    assert [("--head" in words, "--block" in words) for words in nodes] == [(True, False), (False, True)]
    for words in nodes:
        assert not {word for word in words if word.startswith("--")} - RAY_FLAGS[words[1]]
    (port,) = {words[words.index("--port") + 1] for words in nodes if "--port" in words}
    assert nodes[1][nodes[1].index("--address") + 1].endswith(f":{port}")


def test_the_flags_of_ray_are_ray_s() -> None:
    start = pytest.importorskip("ray.scripts.scripts").start
    assert RAY_FLAGS["start"] <= {option for parameter in start.params for option in [*parameter.opts]}


def test_containers_of_compose_have_a_gpu_each() -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    devices = [one["deploy"]["resources"]["reservations"]["devices"][0]["count"] for one in services.values()]
    assert sum(devices) == served("compose.yaml").parallel.world_size
    assert all(one["environment"]["RAY_AUTH_MODE"] == "token" for one in services.values())
    assert services["server"]["environment"]["RAY_ADDRESS"] == "auto"
    assert services["server"]["ports"] == ["127.0.0.1:8000:8000"]


def test_pods_of_kubernetes_have_a_gpu_each_and_are_found() -> None:
    found = {f"{one['kind']}/{one['metadata']['name']}": one for one in documents("kubernetes.yaml")}
    server, nodes = found["Deployment/wan-server"]["spec"], found["Deployment/wan-node"]["spec"]
    parallel = served("kubernetes.yaml").parallel
    assert server["replicas"] + nodes["replicas"] == parallel.world_size * parallel.data_parallel_size
    for pods in (server, nodes):
        labels = pods["template"]["metadata"]["labels"]
        assert pods["selector"]["matchLabels"] == labels
        (container,) = pods["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
        environment = {one["name"]: one for one in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        assert environment["RAY_AUTH_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "wan-ray", "key": "token"}}
    for name in ("wan", "wan-head"):
        assert found[f"Service/{name}"]["spec"]["selector"] == server["template"]["metadata"]["labels"]
    (container,) = server["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert found["Service/wan"]["spec"]["ports"][0]["targetPort"] == 8000


def test_every_file_here_is_told_about() -> None:
    here = {path.name for path in FOLDER.glob("*.yaml")}
    assert here == set(FILES)
    said = Path(ROOT / "docs" / "user_guide" / "multi_node.md").read_text()
    assert all(f"online_serving/{name}" in said for name in here)
