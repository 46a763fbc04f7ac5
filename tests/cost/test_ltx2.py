# SPDX-License-Identifier: Apache-2.0
"""What a full-size LTX-2 clip costs, counted without weights."""

from typing import Any

import pytest
import torch

from tests.docs.markdown import ROOT
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLLTX2Video, Operation
from vllm_omni_vae.autoencoders.cost import Forecaster
from vllm_omni_vae.cli import plan_report
from vllm_omni_vae.cli.full_size import FULL_SIZE
from vllm_omni_vae.config import TileExtent, VaeParallelMode, VaeTileMerge


def without_values(**layers: Any) -> Any:
    with torch.device("meta"):
        made = DistributedAutoencoderKLLTX2Video.from_config(dict(FULL_SIZE["ltx-2"]) | layers)
    torch.nn.Module.to(made, torch.bfloat16)
    made.requires_grad_(False).eval()
    made.enable_tiling()
    return made


@pytest.mark.parametrize(
    ("mode", "grid", "calls", "messages", "megabytes"),
    [
        (VaeParallelMode.SPATIAL_SHARD_WIDTH, (1, 8), 45, 90, 262),
        (VaeParallelMode.SPATIAL_SHARD_GRID, (2, 4), 90, 135, 188),
    ],
)
def test_decode_of_768x1280_and_121_frames_on_8_ranks(
    mode: VaeParallelMode, grid: tuple[int, int], calls: int, messages: int, megabytes: int
) -> None:
    forecast = Forecaster(without_values(), Operation.DECODE, (1, 128, 16, 24, 40)).forecast(mode, 8)
    assert forecast.decision.rank_grid == grid
    inner = max(forecast.uses, key=lambda use: use.halo_messages)
    assert (inner.halo_calls, inner.halo_messages) == (calls, messages)
    assert round(inner.halo_bytes / 1e6) == megabytes
    assert inner.attention_messages == 0
    assert inner.network_calls == 1


def test_a_decoder_that_wants_a_timestep_is_forecast_too() -> None:
    vae = without_values(timestep_conditioning=True, decoder_layers_per_block=(1, 1, 1, 1))
    forecaster = Forecaster(vae, Operation.DECODE, (2, 128, 2, 24, 40))
    assert forecaster.direct().peak_bytes > 0
    for mode in (VaeParallelMode.TILE, VaeParallelMode.SPATIAL_SHARD_WIDTH):
        assert forecaster.forecast(mode, 2).decision.strategy.value == mode.value


def test_27_tiles_of_a_long_clip_on_8_ranks() -> None:
    vae = without_values()
    whole = Forecaster(vae, Operation.DECODE, (1, 128, 16, 24, 40)).direct()
    vae.spec.set_tiling(vae, TileExtent(320, 512, 64), TileExtent(256, 448, 48))
    forecaster = Forecaster(vae, Operation.DECODE, (1, 128, 16, 24, 40))
    assert forecaster.direct() == whole, "not cut in time either"
    assert vae.use_framewise_decoding
    two, eight = (forecaster.forecast(VaeParallelMode.TILE, ranks) for ranks in (2, 8))
    assert eight.decision.grid == (3, 3, 3)
    assert sum(eight.decision.tiles_per_rank) == sum(use.network_calls for use in eight.uses) == 27
    assert eight.decision.imbalance == pytest.approx(eight.cost.imbalance, abs=1e-4)
    assert eight.decision.imbalance == 1.0579
    others = [max(use.peak_bytes for use in forecast.uses[1:]) for forecast in (two, eight)]
    assert others[1] <= others[0] < whole.peak_bytes / 4, "one tile at a time, on however many ranks"


def test_summing_27_tiles_of_a_long_clip_in_integers() -> None:
    vae = without_values()
    vae.spec.set_tiling(vae, TileExtent(320, 512, 64), TileExtent(256, 448, 48))
    forecaster = Forecaster(vae, Operation.DECODE, (1, 128, 16, 24, 40))
    summed, blended = (
        forecaster.forecast(VaeParallelMode.TILE, 8, merge) for merge in (VaeTileMerge.SUM, VaeTileMerge.BLEND)
    )
    whole = 3 * 121 * 768 * 1280 * 2
    assert summed.decision.sent_bytes == whole == 713687040
    assert [use.reduced_bytes for use in summed.uses] == [0, *[whole] * 7]
    assert summed.cost.reduced_bytes == 7 * whole
    assert summed.cost.ranks[0].work == blended.cost.ranks[0].work
    assert (summed.cost.messages, blended.cost.messages) == (0, 7)
    # A rank that sums holds the whole and one tile at a time; the output rank that blends, every tile and the whole.
    assert [summed.uses[0].peak_bytes, summed.peak_bytes] == [1453034496, 1635773440]
    assert [blended.uses[0].peak_bytes, max(use.peak_bytes for use in blended.uses[1:])] == [3029238016, 1075194880]
    assert blended.cost.bytes == 1033666560
    page = (ROOT / "docs" / "design" / "feature" / "vae_parallel.md").read_text()
    for name, forecast in (("blend", blended), ("sum", summed)):
        others = [round(use.peak_bytes / 2**20) for use in forecast.uses[1:]]
        brought = round((forecast.cost.bytes + forecast.cost.reduced_bytes) / 1e6)
        first = round(forecast.uses[0].peak_bytes / 2**20)
        assert f"| `{name}` | {first} MiB | {min(others)} to {max(others)} MiB | {brought} MB |" in page


@pytest.mark.slow
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("height", "width"), [(544, 960), (768, 1280)])
def test_the_guide_on_measuring_says_what_plan_counts(operation: Operation, height: int, width: int) -> None:
    shapes = {
        Operation.ENCODE: (1, 3, 121, height, width),
        Operation.DECODE: (1, 128, 16, height // 32, width // 32),
    }
    forecaster = Forecaster(without_values(), operation, shapes[operation])
    tile, grid = VaeParallelMode.TILE, VaeParallelMode.SPATIAL_SHARD_GRID
    page = (ROOT / "docs" / "user_guide" / "measuring.md").read_text()
    rows = {"direct": forecaster.direct()} | {mode.value: forecaster.forecast(mode, 8) for mode in (tile, grid)}
    for name, forecast in rows.items():
        _, parts, share, _, _, limit, *_, all_bytes, peak = plan_report.cells(name, forecast)
        row = (f"{height}x{width}", operation, f"`{name}`", parts, share, limit, all_bytes, peak)
        assert f"| {' | '.join(row)} |\n" in page
