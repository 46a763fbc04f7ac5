# SPDX-License-Identifier: Apache-2.0
"""What is scraped: how things are, and what finished jobs took."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from vllm_omni_vae import __version__
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, ServerConfig
from vllm_omni_vae.engine.api import Health
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.server.app import create_app
from vllm_omni_vae.server.metrics import MAX_REASONS, METRICS

from .conftest import Running, Serve
from .scripted_engine import DECISION, ScriptedEngine
from .test_videos import create

PREFIX = "vllm_omni_vae_"
# Of each counter and histogram the client tells when its series began.
CREATED = "_created"


def families(text: str) -> Mapping[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(http: httpx.Client | TestClient, name: str) -> dict[tuple[str, ...], float]:
    """Every value of a series, by the values of its labels as they are declared."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    declared = max((one for one in METRICS if (PREFIX + name).startswith(one.name)), key=lambda one: len(one.name))
    found = (sample for family in families(answer.text).values() for sample in family.samples)
    mine = [sample for sample in found if sample.name == PREFIX + name]
    order = [label for label in (*declared.labels, "le") if mine and label in mine[0].labels]
    return {tuple(sample.labels[label] for label in order): sample.value for sample in mine}


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve()


def test_before_any_job(server: Running) -> None:
    assert samples(server.http, "build_info") == {(__version__, "ScriptedPipeline", "tile", "2", "2"): 1}
    assert samples(server.http, "jobs") == {("queued",): 0, ("in_progress",): 0}
    assert samples(server.http, "jobs_finished_total") == {("completed", ""): 0, ("cancelled", ""): 0}
    assert samples(server.http, "queue_limit_jobs") == {(): 64}
    assert samples(server.http, "healthy") == {(): 1}
    process = families(server.http.get("/metrics").text)
    assert process["process_resident_memory_bytes"].samples[0].value > 2**20
    assert "process_cpu_seconds" in process


def test_the_build_is_what_the_engine_was_started_with(tmp_path: Path) -> None:
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=3, ulysses_degree=4, vae_parallel_mode="auto")
    engine = ScriptedEngine(EngineConfig(model="scripted", parallel=parallel))
    client = TestClient(create_app(engine, ServerConfig(media_storage_path=str(tmp_path)), model_name="m"))
    assert samples(client, "build_info") == {(__version__, "ScriptedPipeline", "auto", "3", "4"): 1}
    assert samples(client, "healthy") == {(): 0}, "its engine was never started"


def test_a_completed_job(server: Running) -> None:
    identity = create(server)
    job = server.wait_for(identity, "completed")
    assert samples(server.http, "jobs_finished_total") == {("completed", ""): 1, ("cancelled", ""): 0}
    assert samples(server.http, "stage_seconds_count") == {("denoise",): 1, ("decode",): 1, ("export",): 1}
    seconds = samples(server.http, "stage_seconds_sum")
    assert (seconds["denoise",], seconds["decode",]) == (0.5, 0.25)
    assert seconds["export",] == pytest.approx(job["stage_durations"]["export"])
    buckets = samples(server.http, "stage_seconds_bucket")
    assert (buckets["decode", "0.1"], buckets["decode", "0.25"], buckets["decode", "+Inf"]) == (0, 1, 1)
    assert samples(server.http, "vae_seconds_total") == {("decode", "tile", "0"): 0.25, ("decode", "tile", "1"): 0.125}
    assert samples(server.http, "vae_tiles_total") == {("decode", "0"): 4, ("decode", "1"): 2}
    assert samples(server.http, "vae_sent_bytes_total") == {("decode", "0"): 0, ("decode", "1"): 4096}
    assert samples(server.http, "peak_memory_bytes") == {("0",): 12.5 * 2**20, ("1",): 11 * 2**20}
    assert samples(server.http, "vae_fallbacks_total") == {}
    assert job["vae_use"][1] == {
        "rank": 1,
        "operation": "decode",
        "strategy": "tile",
        "seconds": 0.125,
        "tiles": 2,
        "sent_bytes": 4096,
    }


def test_jobs_add_up_and_one_application_does_not_count_those_of_another(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    other = create_app(ScriptedEngine(), ServerConfig(media_storage_path=str(tmp_path / "b")), model_name="m")
    for _ in range(2):
        server.wait_for(create(server), "completed")
    assert samples(server.http, "jobs_finished_total")["completed", ""] == 2
    assert samples(server.http, "vae_tiles_total") == {("decode", "0"): 8, ("decode", "1"): 4}
    assert samples(TestClient(other), "jobs_finished_total")["completed", ""] == 0


def test_jobs_that_wait_and_run(server: Running) -> None:
    server.engine.may_finish.clear()
    first, second, third = (create(server) for _ in range(3))
    server.wait_for(first, "in_progress")
    assert samples(server.http, "jobs") == {("queued",): 2, ("in_progress",): 1}
    server.http.delete(f"/v1/videos/{third}")
    server.http.delete(f"/v1/videos/{first}")
    server.engine.may_finish.set()
    server.wait_for(second, "completed")
    assert samples(server.http, "jobs_finished_total") == {("completed", ""): 1, ("cancelled", ""): 2}
    assert samples(server.http, "jobs") == {("queued",): 0, ("in_progress",): 0}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (EngineError("rank 1 died", code="worker_died"), "worker_died"),
        (EngineError("rank 0: no memory", code="rank_failed"), "rank_failed"),
        (RuntimeError("a bug"), "internal_error"),
    ],
)
def test_a_failed_job_counts_under_its_code(server: Running, fault: Exception, code: str) -> None:
    server.engine.fault = fault
    server.wait_for(create(server), "failed")
    assert samples(server.http, "jobs_finished_total")["failed", code] == 1
    assert samples(server.http, "stage_seconds_count") == {}


def test_a_request_that_waits_counts_as_a_job(server: Running) -> None:
    assert server.http.post("/v1/videos/sync", json={"prompt": "a cat"}).status_code == 200
    assert samples(server.http, "jobs_finished_total")["completed", ""] == 1


def fallback(reason: str) -> dict[str, object]:
    return {**DECISION, "fallback": True, "reason": reason}


def test_fallbacks_are_told_by_their_reason_without_its_numbers(server: Running) -> None:
    for rows in (1, 12):
        reason = f"spatial_shard_height: {rows}x30 latents cannot give each of 16 ranks a row or column"
        server.engine.decisions = (fallback(reason), {**DECISION, "fallback": False, "reason": "as configured"})
        server.wait_for(create(server), "completed")
    reason = "spatial_shard_height: NxN latents cannot give each of N ranks a row or column"
    assert samples(server.http, "vae_fallbacks_total") == {("decode", reason): 2}


def test_there_are_only_so_many_reasons(server: Running) -> None:
    reasons = ["x" * n for n in range(1, MAX_REASONS + 4)]
    server.engine.decisions = tuple(fallback(reason) for reason in reasons)
    for _ in range(2):
        server.wait_for(create(server), "completed")
    counted = samples(server.http, "vae_fallbacks_total")
    assert counted == {**{("decode", reason): 2 for reason in reasons[:MAX_REASONS]}, ("decode", "other"): 6}


def test_restarts_are_those_of_the_engine(server: Running) -> None:
    assert samples(server.http, "worker_restarts_total") == {}
    server.engine.restarts = {"worker_died": 2}
    assert samples(server.http, "worker_restarts_total") == {("worker_died",): 2}
    server.engine.restarts = {"worker_died": 3, "worker_stalled": 1}
    server.engine.state = Health(False, "restarting: rank 1 died")
    assert samples(server.http, "worker_restarts_total") == {("worker_died",): 3, ("worker_stalled",): 1}
    assert samples(server.http, "healthy") == {(): 0}


def test_replicas_are_counted_by_whether_they_take_jobs(server: Running) -> None:
    assert samples(server.http, "replicas") == {("running",): 1, ("down",): 0}
    server.engine.replicas = [Health(True), Health(False, "loading"), Health(True)]
    assert samples(server.http, "replicas") == {("running",): 2, ("down",): 1}


def test_requests_are_counted_by_route_and_not_by_path(serve: Serve) -> None:
    server = serve(api_key=("key",))
    for identity in ("video_1", "video_2"):
        assert server.http.get(f"/v1/videos/{identity}").status_code == 404
        assert server.http.delete(f"/v1/videos/{identity}").status_code == 404
        assert server.http.get(f"/nowhere/{identity}").status_code == 404
    assert server.http.get("/v1/videos/v/content", headers={"Authorization": "no"}).status_code == 401
    assert server.http.request("TRACE", "/version").status_code == 405
    counted = samples(server.http, "http_requests_total")
    health = {label: counted.pop(label) for label in list(counted) if label[0] == "/health"}
    assert set(health) <= {("/health", "GET", "503"), ("/health", "GET", "200")}
    assert counted == {
        ("/v1/videos/{video_id}", "GET", "404"): 2,
        ("/v1/videos/{video_id}", "DELETE", "404"): 2,
        ("unmatched", "GET", "404"): 2,
        ("/v1/videos/{video_id}/content", "GET", "401"): 1,
        ("/version", "other", "405"): 1,
    }
    assert samples(server.http, "http_requests_total")["/metrics", "GET", "200"] == 1


def test_a_key_is_needed_where_there_are_keys(serve: Serve) -> None:
    server = serve(api_key=("key",))
    assert server.http.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert server.http.get("/metrics").status_code == 200


def test_a_scraper_gets_the_format_that_it_asks_for(server: Running) -> None:
    server.wait_for(create(server), "completed")
    text = server.http.get("/metrics", headers={"Accept": "text/plain"})
    assert text.headers["content-type"].startswith("text/plain; version=")
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = server.http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    told = {family.name for family in openmetrics(answer.text)}
    assert told >= {name for name in families(text.text) if not name.endswith(CREATED)}


def exposed(server: Running) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, kind and labels of every family of this package that is scraped and has a series."""
    for family in families(server.http.get("/metrics").text).values():
        if family.name.startswith(PREFIX) and not family.name.endswith(CREATED):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = [label for label in family.samples[0].labels if label != "le"] if family.samples else []
            yield name, family.type, tuple(sorted(labels))


def test_what_is_scraped_is_what_is_declared(server: Running) -> None:
    server.engine.decisions = (fallback("too small"),)
    server.engine.restarts = {"worker_died": 1}
    server.wait_for(create(server), "completed")
    declared = [(one.name, one.kind.__name__.lower(), tuple(sorted(one.labels))) for one in METRICS]
    assert sorted(exposed(server)) == sorted(declared)
    for name, kind, _ in declared:
        assert name.startswith(PREFIX)
        assert name.endswith("_total") == (kind == "counter")
