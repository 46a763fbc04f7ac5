# SPDX-License-Identifier: Apache-2.0
"""A processor that transformers cannot make without torchvision is named before anything is loaded."""

import pytest
import transformers

from vllm_omni_vae.pipelines import processors
from vllm_omni_vae.pipelines.processors import NEED_TORCHVISION, missing_torchvision

INDEX = {
    "_class_name": "QwenImageEditPipeline",
    "_name_or_path": ["not", "a", "component"],
    "processor": ["transformers", "Qwen2VLProcessor"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}


def test_the_component_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    (reason,) = missing_torchvision(INDEX)
    assert reason.startswith("processor: Qwen2VLProcessor of transformers needs torchvision")
    assert "pip install 'vllm-omni-vae[images]'" in reason
    assert missing_torchvision({name: entry for name, entry in INDEX.items() if name != "processor"}) == []


def test_nothing_is_missing_here() -> None:
    assert missing_torchvision(INDEX) == []
    assert all(hasattr(transformers, name) for name in NEED_TORCHVISION)
