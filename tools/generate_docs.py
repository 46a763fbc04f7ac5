# SPDX-License-Identifier: Apache-2.0
"""Write the pages of ``docs/generated`` from the code that they describe.

    python tools/generate_docs.py [--check]

With ``--check`` nothing is written; the exit code is 1 and the stale pages are named when the code has moved on. The
same code gives the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_omni_vae.autoencoders import FAMILIES, Operation
from vllm_omni_vae.autoencoders.untiled_classes import CLASSES, UntiledClass
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, VaeParallelMode
from vllm_omni_vae.config.flags import CONFIGS, Flag, flags
from vllm_omni_vae.pipelines.profile import PipelineProfile
from vllm_omni_vae.pipelines.registry import find_profile, registered
from vllm_omni_vae.pipelines.request import Medium, ModelCard, Task
from vllm_omni_vae.server.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "generated"
WIDTH = 120
NOTE = "<!-- Written by tools/generate_docs.py; `make docs` writes it anew. -->"

PROMISES: Mapping[VaeParallelMode, str] = {
    VaeParallelMode.TILE: "bit-equal to diffusers' own tiles of the same size and stride on one rank",
    VaeParallelMode.AUTO: "what the strategy promises that it takes; a family with `tile` alone takes `tile`",
    **dict.fromkeys(
        (
            VaeParallelMode.SPATIAL_SHARD_HEIGHT,
            VaeParallelMode.SPATIAL_SHARD_WIDTH,
            VaeParallelMode.SPATIAL_SHARD_GRID,
        ),
        "equal to the un-tiled result on one rank, up to the order in which floats are added",
    ),
}
"""What a mode promises; shown once some family has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """A released kind of checkpoint: as much of its JSON files as a profile reads.

    Attributes:
        name: What people call it.
        index: ``model_index.json``.
        configs: ``config.json`` of components, ``scheduler_config.json`` of the scheduler.
        run_as: The ``--model-class-name`` that it is run with, if any.
    """

    name: str
    index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    run_as: str = ""

    @property
    def pipeline_class(self) -> str:
        """The class that it is run as."""
        return self.run_as or str(self.index["_class_name"])


_DENOISER = ["diffusers", "WanTransformer3DModel"]
_VAE = ["diffusers", "AutoencoderKLWan"]
_ONE = {"vae": _VAE, "transformer": _DENOISER, "transformer_2": [None, None]}
_TWO = {"vae": _VAE, "transformer": _DENOISER, "transformer_2": _DENOISER}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {"vae": {}, "transformer": {}, "transformer_2": {}}

_LTX_2 = {
    "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
    "vae": ["diffusers", "AutoencoderKLLTX2Video"],
    "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"],
    "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
    "vocoder": ["ltx2", "LTX2Vocoder"],
}
_LTX_2_5_INDEX = {**_LTX_2, "text_encoder": ["transformers", "Gemma4UnifiedForConditionalGeneration"]}
_SHIFTED = {"use_dynamic_shifting": True, "shift_terminal": 0.1}
_LTX_2_VAE = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
_LTX_2_0: Mapping[str, Mapping[str, Any]] = {"vae": _LTX_2_VAE, "transformer": {}, "scheduler": _SHIFTED}
_LTX_2_3: Mapping[str, Mapping[str, Any]] = {
    "vae": {**_LTX_2_VAE, "decoder_spatial_padding_mode": "zeros"},
    "transformer": {"cross_attn_mod": True},
    "scheduler": _SHIFTED,
}

_IMAGES = {"vae": ["diffusers", "an autoencoder"], "transformer": ["diffusers", "a denoiser"]}
_Z_IMAGE: Mapping[str, Mapping[str, Any]] = {"vae": {"block_out_channels": [128, 256, 512, 512]}, "transformer": {}}

RELEASES: tuple[Release, ...] = (
    Release("Wan 2.1 text to video", {"_class_name": "WanPipeline", **_ONE}, _CONFIGS),
    Release("Wan 2.1 image to video", {"_class_name": "WanImageToVideoPipeline", **_ONE}, _CONFIGS),
    Release("Wan 2.2 A14B text to video", {"_class_name": "WanPipeline", **_TWO}, _CONFIGS),
    Release("Wan 2.2 A14B image to video", {"_class_name": "WanImageToVideoPipeline", **_TWO}, _CONFIGS),
    Release(
        "Wan 2.2 TI2V-5B",
        {"_class_name": "WanPipeline", **_ONE, "expand_timesteps": True},
        {**_CONFIGS, "vae": {"scale_factor_spatial": 16}},
    ),
    Release("LTX-2.0", {"_class_name": "LTX2Pipeline", **_LTX_2}, _LTX_2_0),
    Release("LTX-2.0 saved as image to video", {"_class_name": "LTX2ImageToVideoPipeline", **_LTX_2}, _LTX_2_0),
    Release("LTX-2.3", {"_class_name": "LTX2Pipeline", **_LTX_2}, _LTX_2_3),
    Release("LTX-2.5", {"_class_name": "LTX2Pipeline", **_LTX_2_5_INDEX}, {**_LTX_2_3, "scheduler": {}}),
    Release("LTX-2.5 with its full denoiser", {"_class_name": "LTX2Pipeline", **_LTX_2_5_INDEX}, _LTX_2_3),
    *(
        Release(
            f"{name} in two stages",
            {"_class_name": "LTX2Pipeline", **_LTX_2},
            {**configs, "latent_upsampler": {}},
            run_as="LTX2TwoStagesPipeline",
        )
        for name, configs in (("LTX-2.0", _LTX_2_0), ("LTX-2.3", _LTX_2_3))
    ),
    *(
        Release(name, {"_class_name": f"{kind}Pipeline", **_IMAGES, **more}, {"vae": vae, "transformer": denoiser})
        for name, kind, more, vae, denoiser in (
            ("Qwen-Image", "QwenImage", {}, {}, {}),
            ("Qwen-Image-Edit", "QwenImageEdit", {}, {}, {}),
            ("Qwen-Image-Edit-2509, 2511", "QwenImageEditPlus", {}, {}, {}),
            ("Qwen-Image-Layered", "QwenImageLayered", {}, {"input_channels": 4}, {}),
            ("FLUX.2 [dev]", "Flux2", {}, {}, {}),
            ("FLUX.2 [klein]", "Flux2Klein", {"is_distilled": True}, {}, {"guidance_embeds": False}),
            ("FLUX.2 [klein] base", "Flux2Klein", {"is_distilled": False}, {}, {"guidance_embeds": False}),
        )
    ),
    *(
        Release(name, {"_class_name": "ZImagePipeline", **_IMAGES}, {**_Z_IMAGE, "scheduler": {"shift": shift}})
        for name, shift in (("Z-Image", 6.0), ("Z-Image-Turbo", 3.0))
    ),
)

SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"ulysses_degree": 2},
    {"ring_degree": 2},
    {"ulysses_degree": 2, "ring_degree": 2},
    {"use_hsdp": True, "hsdp_shard_size": 2},
    {"use_hsdp": True, "hsdp_shard_size": 2, "ulysses_degree": 2},
    {"tensor_parallel_size": 2},
    {"cfg_parallel_size": 2},
)
"""Ways to spread the denoiser that the page asks every profile about."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check every page and return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/generated from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail and name the pages that are stale")
    check = parser.parse_args(argv).check
    stale = [page for name in WRITERS if not _is_current(page := PAGES / name, WRITERS[name]())]
    for page in stale:
        if check:
            print(f"{page.relative_to(ROOT)} is stale; run `make docs`", file=sys.stderr)
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(WRITERS[page.name](), encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return int(check and bool(stale))


def _is_current(page: Path, text: str) -> bool:
    return page.is_file() and page.read_text(encoding="utf-8") == text


def flags_page() -> str:
    """The page of flags, one table for each configuration class."""
    parts = [
        NOTE,
        "# Flags",
        "Every flag of `vllm-omni-vae serve`. Under `vllm serve` those marked *vLLM's own* come from vLLM and mean the "
        "same; the others are added by this package. From Python, the field of the same name with underscores takes "
        "the value.",
    ]
    for config in CONFIGS:
        summary = inspect.cleandoc(config.__doc__ or "").splitlines()[0]
        rows = [_flag_row(flag) for flag in flags((config,))]
        parts += [f"## {config.__name__}", summary, _table(("flag", "default", "meaning", "vLLM's own"), rows)]
    return _page(parts)


def _flag_row(flag: Flag) -> tuple[str, ...]:
    first, *aliases = flag.spellings
    names = [first, *([f"--no-{first[2:]}"] if _is_switch(flag) else []), *aliases]
    meaning, _, default = flag.option.help.partition(" Default: ")
    if isinstance(flag.default, StrEnum):
        meaning += f" One of {', '.join(f'`{choice}`' for choice in type(flag.default))}."
    return ", ".join(f"`{name}`" for name in names), default.rstrip(".") or _shown(flag.default), meaning, _mark(flag)


def _is_switch(flag: Flag) -> bool:
    return flag.type is bool or flag.type == (bool | None)


def _mark(flag: Flag) -> str:
    return "yes" if flag.option.shared else ""


def _shown(default: Any) -> str:
    if default in (None, (), {}):
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(f"`{value}`" for value in default)
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def support_page() -> str:
    """The page of what can be served and shared, and what is refused."""
    return _page(
        [
            NOTE,
            "# Support matrix",
            "## VAE families",
            "Refused means: once more than one rank is to share the VAE, the server, `Omni` and `distribute` end with "
            "an error that names the modes there are.",
            _families(),
            "## What a mode promises",
            _promises(),
            "## Pipelines",
            "Told from the JSON files of a checkpoint, so a fine-tuned one counts as what it was made from. Defaults "
            "are used where neither the request nor `--default-sampling-params` says otherwise. What runs in two "
            "stages is asked for with `--model-class-name` and the class shown.",
            _releases(Medium.VIDEO),
            "Image models. Those that are made for one area take the default size from the aspect of a reference "
            "image, with as many pixels; FLUX.2 takes the first image's own size, scaled down to 1024x1024 pixels.",
            _releases(Medium.IMAGE),
            "## Ranks of the denoiser",
            "These divide the denoiser and go together with `--vae-patch-parallel-size`. What a pipeline cannot do is "
            "refused at start-up, with the words below.",
            _settings(),
        ]
    )


def _families() -> str:
    rows = []
    for family in FAMILIES:
        modes = ["yes" if mode in family.spec.modes else "refused" for mode in VaeParallelMode]
        both = ["yes" if operation in family.spec.operations else "no" for operation in Operation]
        split = "refused" if family.spec.no_pieces else "yes"
        rows.append((f"`{family.spec.base_class.__name__}`", f"`{family.__name__}`", *both, *modes, split))
    names = (*Operation, *(f"`{mode}`" for mode in VaeParallelMode), "split by rank")
    return _table(("diffusers class", "distributed class", *names), rows)


def _promises() -> str:
    had = {mode for family in FAMILIES for mode in family.spec.modes}
    said = {mode: PROMISES[mode] if mode in had else "not there yet: no family has it" for mode in VaeParallelMode}
    return _table(("mode", "promise"), [(f"`{mode}`", promise) for mode, promise in said.items()])


def _releases(medium: Medium) -> str:
    missing = set(registered()) - {release.pipeline_class for release in RELEASES}
    if missing:
        raise SystemExit(f"no release in {Path(__file__).name} has the pipeline class {', '.join(sorted(missing))}")
    described = [(release, profile, profile.card(folder)) for release, profile, folder in _checkpoints()]
    facts = _FACTS[medium]
    rows = [
        (*_made(release, card), *facts(card), ", ".join(f"`{name}`" for name in sorted(profile.extra_params)))
        for release, profile, card in described
        if card.medium is medium
    ]
    return _table(
        ("checkpoint", "pipeline class", "makes", "width and height", *_HEADS[medium], "`extra_params`"), rows
    )


def _made(release: Release, card: ModelCard) -> tuple[str, ...]:
    tasks = ", ".join(str(task).replace("-", " ") for task in Task if task in card.tasks)
    return release.name, f"`{release.pipeline_class}`", tasks, f"multiples of {card.spatial_multiple}"


def _of_clips(card: ModelCard) -> tuple[str, ...]:
    usual = card.defaults
    return (
        f"1 + {card.temporal_ratio}k",
        f"{usual.width}x{usual.height}",
        f"{usual.num_frames} at {usual.fps} fps",
        str(usual.num_inference_steps),
        f"{usual.guidance_scale:g}",
    )


def _of_images(card: ModelCard) -> tuple[str, ...]:
    usual = card.defaults
    guided = {"guidance_scale": usual.guidance_scale, "true_cfg_scale": usual.true_cfg_scale}
    scales = [f"`{name}` {value:g}" for name, value in guided.items() if value is not None and name in card.takes]
    takes = [name for name in ("mask", "layers", "negative_prompt") if name in card.takes]
    needed = "" if Task.TEXT_TO_IMAGE in card.tasks else "1 to " if card.max_references > 1 else "just "
    return (
        f"{usual.width}x{usual.height}",
        str(usual.num_inference_steps),
        ", ".join(scales) or "none",
        f"{needed or 'up to '}{card.max_references}{', RGBA' if card.transparency else ''}",
        ", ".join(f"`{name}`" for name in takes) or "none of them",
    )


_HEADS: Mapping[Medium, tuple[str, ...]] = {
    Medium.VIDEO: ("frames", "default size", "default frames", "default steps", "default guidance"),
    Medium.IMAGE: (
        "default size",
        "default steps",
        "default guidance",
        "reference images",
        "mask, layers, negative prompt",
    ),
}
_FACTS: Mapping[Medium, Callable[[ModelCard], tuple[str, ...]]] = {Medium.VIDEO: _of_clips, Medium.IMAGE: _of_images}


def cards() -> dict[str, ModelCard]:
    """What the profiles say of every release, by its name."""
    return {release.name: profile.card(folder) for release, profile, folder in _checkpoints()}


def _settings() -> str:
    rows = []
    for setting in SETTINGS:
        config = EngineConfig(model="", parallel=DiffusionParallelConfig(**setting))
        runs = "runs on accelerators; refused on the CPU" if config.parallel.ring_degree > 1 else "runs"
        answers: dict[str, list[str]] = {}
        for release, profile, folder in _checkpoints():
            answers.setdefault("; ".join(profile.refusals(folder, config)) or runs, []).append(release.name)
        alike = len(answers) == 1
        shown = [answer if alike else f"{answer} ({', '.join(names)})" for answer, names in answers.items()]
        rows.append((" ".join(map(_spelt, setting.items())), "<br>".join(shown)))
    return _table(("flags", "answer"), rows)


def _spelt(setting: tuple[str, Any]) -> str:
    name, value = setting
    flag = f"--{name.replace('_', '-')}"
    return f"`{flag}`" if value is True else f"`{flag} {value}`"


def _checkpoints() -> Iterator[tuple[Release, PipelineProfile, Path]]:
    """Every release with its profile and a folder of its JSON files, which goes when the next one is asked for."""
    for release in RELEASES:
        profile = find_profile(release.pipeline_class)
        if profile is None or not profile.fits(release.pipeline_class, release.index["_class_name"]):
            raise SystemExit(f"{release.name}: no profile serves {release.pipeline_class}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "model_index.json").write_text(json.dumps(release.index))
            for component, config in release.configs.items():
                (folder / component).mkdir()
                file = "scheduler_config.json" if component == "scheduler" else "config.json"
                (folder / component / file).write_text(json.dumps(config))
            yield release, profile, folder


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _page(parts: Iterable[str]) -> str:
    return (
        "\n\n".join(part if part[0] in "|<" else textwrap.fill(part, WIDTH, break_on_hyphens=False) for part in parts)
        + "\n"
    )


def vae_page() -> str:
    """The page of every autoencoder class of diffusers that can be shared, and of those that a shard refuses."""
    rows: list[tuple[str, ...]] = []
    for family in FAMILIES:
        tiles = "exact" if VaeParallelMode.TILE in family.spec.modes else ""
        shards = ("exact" if operation in family.spec.operations else f"no {operation}" for operation in Operation)
        rows.append((f"`{family.spec.base_class.__name__}`", tiles, *shards))
    rows += [(f"`{facts.name}`", "", *_exactness(facts)) for facts in CLASSES]
    return _page(
        [
            NOTE,
            "# VAE matrix",
            "Which of diffusers' autoencoders can be shared by `distribute`. A shard is `spatial_shard_height`, "
            "`spatial_shard_width`, `spatial_shard_grid`, or `auto` where it takes one of them.",
            "Exact means: tiles are bit-equal to diffusers' own tiles; a shard equals the un-tiled result of the class "
            "up to the order in which floats are added, which the tests hold to 1e-12 of the output's scale in "
            "float64.",
            _table(("diffusers class", "`tile`", "shard: encode", "shard: decode"), rows),
            "Classes without `tile` run as their own un-tiled networks. An operation that cannot be a shard runs on "
            "every rank by itself, with one warning; a class of which neither can is refused at set-up. Classes that "
            "are not listed cannot be distributed.",
        ]
    )


def _exactness(facts: UntiledClass) -> Iterator[str]:
    for operation in Operation:
        refusal = facts.refusal(operation)
        without = f", unless it has `{facts.without}`" if facts.without else ""
        yield f"no: {refusal}" if refusal else f"exact{without}"


def metrics_page() -> str:
    """The page of everything that ``/metrics`` answers."""
    rows = [
        (f"`{one.name}`", one.kind.__name__.lower(), ", ".join(f"`{label}`" for label in one.labels), one.meaning)
        for one in METRICS
    ]
    return _page(
        [
            NOTE,
            "# Metrics",
            "What `GET /metrics` of a server answers. Of a histogram there are the series `_bucket`, `_sum` and "
            "`_count`, and of counters and histograms also `_created`, when a series began. Beside these there are the "
            "`process_*` metrics of the server process, which are those of any Python program.",
            _table(("metric", "type", "labels", "value"), rows),
        ]
    )


WRITERS: Mapping[str, Callable[[], str]] = {
    "flags.md": flags_page,
    "metrics.md": metrics_page,
    "support_matrix.md": support_page,
    "vae_matrix.md": vae_page,
}


if __name__ == "__main__":
    sys.exit(main())
