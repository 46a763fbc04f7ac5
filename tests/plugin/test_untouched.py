# SPDX-License-Identifier: Apache-2.0
"""With the plugin installed, vLLM does with everything but diffusion models what it did before."""

from collections.abc import Mapping
from typing import Any

import pytest

from vllm_omni_vae.config.flags import flags

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

OURS = [spelling for flag in flags() if not flag.option.shared for spelling in flag.spellings]


def test_a_language_model_reaches_vllm_with_the_namespace_that_it_had(
    without_plugin: Mapping[str, Any], with_plugin: Mapping[str, Any]
) -> None:
    for name in ("llm", "llm_folder", "llm_default", "llm_yaml", "llm_with_unknown_index"):
        before, after = without_plugin["commands"][name], with_plugin["commands"][name]
        assert before["ran"] == "vllm"
        assert after == before, name
    assert before["namespace"]["dispatch_function"] == "ServeSubcommand.cmd"


def test_other_commands_and_errors_print_what_they_printed(
    without_plugin: Mapping[str, Any], with_plugin: Mapping[str, Any]
) -> None:
    for name in ("help", "bench_help", "run_batch_help", "launch_help", "llm_unknown_flag"):
        before, after = without_plugin["commands"][name], with_plugin["commands"][name]
        assert before["stdout"] or before["stderr"]
        assert after == before, name
    assert "--max-concurrency" in with_plugin["commands"]["bench_help"]["stdout"]
    assert not [flag for flag in OURS if f"{flag} " in with_plugin["commands"]["bench_help"]["stdout"]]


def test_serve_help_shows_every_flag_of_ours(with_plugin: Mapping[str, Any]) -> None:
    commands = with_plugin["commands"]
    assert not [flag for flag in OURS if flag not in commands["serve_help"]["stdout"]]
    assert "--vae-use-slicing" in commands["serve_group_help"]["stdout"]
    assert "--max-model-len" not in commands["serve_group_help"]["stdout"]
    assert "--vae-tile-stride" in commands["serve_one_help"]["stdout"]


def test_our_flags_with_a_language_model_are_refused_by_name(with_plugin: Mapping[str, Any]) -> None:
    folder = with_plugin["commands"]["ours_with_llm_folder"]
    assert (folder["ran"], folder["exit"]) == (None, 2)
    assert "--vae-use-tiling, --vae-tile-size can only be used with a diffusers checkpoint" in folder["stderr"]
    assert "llm is none: there is no model_index.json in it" in folder["stderr"]

    name = with_plugin["commands"]["ours_with_llm_name"]
    assert (name["ran"], name["exit"]) == (None, 2)
    assert "--vae-use-tiling can only be used with a diffusers checkpoint: some/llm is no local" in name["stderr"]
