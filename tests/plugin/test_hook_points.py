# SPDX-License-Identifier: Apache-2.0
"""What the plugin relies on in the installed vLLM, seen by a plugin that only watches."""

from collections.abc import Mapping
from typing import Any

import pytest

from vllm_omni_vae.config.flags import flags

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]


def test_plugins_are_loaded_before_the_functions_that_are_replaced_are_looked_up(
    without_plugin: Mapping[str, Any],
) -> None:
    calls = without_plugin["calls"]
    assert calls[0] == "EngineArgs.add_cli_args vllm serve"
    assert [call for call in calls if "Subcommand" in call][:2] == ["ServeSubcommand.validate", "ServeSubcommand.cmd"]


def test_other_commands_build_their_parsers_with_the_same_function_under_another_name(
    without_plugin: Mapping[str, Any],
) -> None:
    others = {call.split(maxsplit=1)[1] for call in without_plugin["calls"] if call.startswith("EngineArgs")}
    assert {"vllm serve", "vllm run-batch"} < others
    assert any(name.startswith("vllm bench") for name in others)
    assert any(name.startswith("vllm launch") for name in others)


def test_vllm_has_the_flags_that_are_shared_and_none_of_the_others(
    without_plugin: Mapping[str, Any], with_plugin: Mapping[str, Any]
) -> None:
    vllms = without_plugin["commands"]["llm"]["namespace"]
    shared = {flag.name for flag in flags() if flag.option.shared}
    assert shared <= vllms.keys()
    assert not {flag.name for flag in flags() if not flag.option.shared} & vllms.keys()
