# SPDX-License-Identifier: Apache-2.0
"""Which models count as diffusers checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from vllm_omni_vae import checkpoint
from vllm_omni_vae.errors import ConfigurationError, UnsupportedError


def _folder(tmp_path: Path, index: str) -> str:
    (tmp_path / checkpoint.INDEX).write_text(index)
    return str(tmp_path)


def _hub_says(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)


@pytest.mark.parametrize("name", ['"WanPipeline"', '["wan_pipeline", "WanPipeline"]'])
def test_a_folder_with_an_index_is_one(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path, f'{{"_class_name": {name}}}')
    assert checkpoint.find(folder) == checkpoint.Checkpoint(folder, tmp_path, "WanPipeline")


def test_a_folder_without_an_index_is_none_and_the_hub_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hub_says(monkeypatch, AssertionError("asked"))
    assert checkpoint.find(str(tmp_path), online=True) is None
    with pytest.raises(ConfigurationError, match=r"is no diffusers checkpoint: there is no model_index\.json in it"):
        checkpoint.require(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "message"), [("{", "cannot read"), ("[]", "names no pipeline"), ('{"a": 1}', "names no pipeline")]
)
def test_a_broken_index_is_an_error(tmp_path: Path, index: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        checkpoint.find(_folder(tmp_path, index))


@pytest.mark.parametrize("model", ["/no/such/folder", "some/name/that/no/hub/has", ""])
def test_what_is_no_folder_and_no_hub_name_is_none(model: str) -> None:
    assert checkpoint.find(model, online=True) is None


def test_a_hub_model_is_looked_up_online_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path, '{"_class_name": "WanPipeline"}')
    _hub_says(monkeypatch, tmp_path / checkpoint.INDEX)
    assert checkpoint.find("some/wan", cache_dir=str(tmp_path)) is None
    found = checkpoint.find("some/wan", cache_dir=str(tmp_path), online=True)
    assert found == checkpoint.Checkpoint("some/wan", tmp_path, "WanPipeline")


def test_a_hub_model_without_an_index_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_says(monkeypatch, EntryNotFoundError("no such file"))
    assert checkpoint.find("some/llm", cache_dir=str(tmp_path), online=True) is None


@pytest.mark.parametrize("error", [OSError("no route to host"), LocalEntryNotFoundError("no route to host")])
def test_a_hub_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _hub_says(monkeypatch, error)
    with pytest.raises(ConfigurationError, match=r"could not be asked about it \(no route to host\)"):
        checkpoint.find("some/wan", cache_dir=str(tmp_path), online=True)


def test_profiles_are_found_by_pipeline_class(tmp_path: Path) -> None:
    assert "WanPipeline" in checkpoint.Checkpoint("wan", tmp_path, "WanPipeline").profile().pipeline_classes
    with pytest.raises(UnsupportedError, match=r"NobodysPipeline checkpoint, which cannot be served.*WanPipeline"):
        checkpoint.Checkpoint("x", tmp_path, "NobodysPipeline").profile()
