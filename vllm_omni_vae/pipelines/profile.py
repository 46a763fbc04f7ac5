# SPDX-License-Identifier: Apache-2.0
"""How a diffusers pipeline is served: what it can do, how a request maps to its arguments, where its VAEs are."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, RequestError
from .checks import check_extra, check_numbers, check_steps, check_taken, check_task
from .request import GenerationRequest, ModelCard, Range, SamplingDefaults

if TYPE_CHECKING:
    import torch

    from ..config import DiffusionParallelConfig, EngineConfig


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises:
        ConfigurationError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}; is this a complete diffusers checkpoint?") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} holds no JSON object; is this a complete diffusers checkpoint?")
    return value


def index_class(index: Mapping[str, Any]) -> str:
    """The pipeline class that a ``model_index.json`` names; one that brings its module along is named last."""
    name = index["_class_name"]
    return str(name[-1] if isinstance(name, list) else name)


def require_named(folder: Path, index: Mapping[str, Any], *names: str) -> None:
    """Refuse a checkpoint whose ``model_index.json``, ``index``, leaves out one of ``names``.

    Raises:
        ConfigurationError: names it.
    """
    for name in names:
        if not (index.get(name) or [None])[0]:
            raise ConfigurationError(
                f"{folder} names no {name} in its model_index.json; is this a complete checkpoint?"
            )


def read_part(folder: Path, index: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The configuration of the component ``name``.

    Raises:
        ConfigurationError: the index does not name it, or it cannot be read.
    """
    require_named(folder, index, name)
    return read_json(folder / name / "config.json")


def hsdp_refusals(parallel: DiffusionParallelConfig, name: str, beside: str) -> list[str]:
    """Why the denoiser of ``name`` cannot have sharded weights; ``beside``: what else is to divide it."""
    found = []
    if parallel.use_hsdp and parallel.dit_world_size == 1:
        found.append("--use-hsdp: there is one denoiser rank, so nothing is sharded; give --hsdp-shard-size")
    if parallel.use_hsdp and beside:
        found.append(f"--use-hsdp together with {beside}: not available for {name}; choose one of them")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """What a pipeline made of one request. On a rank that does not own decoded samples, values have no meaning.

    Attributes:
        frames: ``(T, C, H, W)`` in 0..1; of an image T is 1, or its layers.
        samples: ``(channels, n)`` in -1..1, or None without sound.
        rate: Samples per second of each channel.
    """

    frames: torch.Tensor
    samples: torch.Tensor | None = None
    rate: int = 0


class PipelineProfile(ABC):
    """One family of pipelines, known by the class names in their ``model_index.json``.

    `card`, `refusals` and `resolve` never import torch: the server calls them. `call`, `complete` and `share_sequence`
    run in a worker.

    Class attributes:
        pipeline_classes: Names of the classes that this profile serves.
        checkpoint_classes: What an index may name so that its checkpoint can be run as any of them; empty: each runs
            its own alone.
        denoisers: Components that the denoiser's parallelism applies to, where they are present.
        text_encoders: Components whose weights ``use_hsdp`` shards too.
        sound: Components that make the sound, in their order; they run once, where the frames are.
        full_precision: Components that stay in float32 where no type was asked for.
        unused: Components of ``model_index.json`` that no request makes use of; they are not loaded.
        extra_params: Names that a request's ``extra_params`` may hold.
        numbers: Those of them that are numbers, with their ranges.
        switches: Those of them that are true or false.
        least_steps: Denoising steps below which the schedule cannot be made.
    """

    pipeline_classes: tuple[str, ...]
    checkpoint_classes: tuple[str, ...] = ()
    denoisers: tuple[str, ...] = ("transformer",)
    text_encoders: tuple[str, ...] = ("text_encoder",)
    sound: tuple[str, ...] = ()
    full_precision: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    extra_params: frozenset[str] = frozenset({"reference_fit"})
    numbers: Mapping[str, Range] = MappingProxyType({})
    switches: frozenset[str] = frozenset()
    least_steps: int = 1

    @abstractmethod
    def card(self, folder: Path) -> ModelCard:
        """Describe the checkpoint in ``folder`` from its JSON files."""

    @abstractmethod
    def refusals(self, folder: Path, config: EngineConfig) -> list[str]:
        """Say why ``config`` cannot be run on this checkpoint; empty when it can."""

    @abstractmethod
    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        """Run a loaded diffusers pipeline once on a resolved request.

        Args:
            pipeline: The pipeline of the checkpoint.
            request: As `resolve` returned it.
            arguments: Further arguments of the pipeline: its generator and step callback.
        """

    def fits(self, asked: str, found: str) -> bool:
        """Whether a checkpoint whose index names the class ``found`` can be run as ``asked``, which is one of ours."""
        return found in self.checkpoint_classes if self.checkpoint_classes else found == asked

    def complete(self, pipeline: Any, load: Callable[[Any, str], Any]) -> Any:
        """Return a loaded ``pipeline`` with what it needs beyond the components that its index names.

        Args:
            pipeline: The pipeline of the checkpoint, in its place.
            load: Loads a class from a folder of the checkpoint, as the pipeline's components were loaded.
        """
        return pipeline

    def share_sequence(self, denoiser: Any, config: Any) -> None:
        """Divide the tokens of a loaded ``denoiser`` among its ranks as diffusers' context parallel ``config`` says."""
        denoiser.enable_parallelism(config=config)

    def defaults(self, request: GenerationRequest, card: ModelCard) -> SamplingDefaults:
        """The model's own values for what ``request`` leaves open."""
        return card.defaults

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        """Return ``request`` with every open value filled in, or refuse it.

        Args:
            request: What was asked.
            card: The model's description.
            defaults: Values of the operator (``--default-sampling-params``) that go before the model's own.

        Raises:
            RequestError: a value that the model cannot make exactly, with the nearest that it can.
        """
        check_task(request, card)
        usual = self.defaults(request, card)
        filled: dict[str, Any] = {}
        for field in dataclasses.fields(request):
            if getattr(request, field.name) is None:
                value = defaults.get(field.name, getattr(usual, field.name, None))
                if value is not None:
                    filled[field.name] = value
        request = dataclasses.replace(request, **filled)
        check_numbers(request, card)
        unknown = sorted(set(request.extra_params) - self.extra_params)
        if unknown:
            raise RequestError(
                f"extra_params {', '.join(unknown)} mean nothing to this model; "
                f"it knows {', '.join(sorted(self.extra_params))}",
                param="extra_params",
                code="unknown_parameter",
            )
        check_taken(request, card)
        check_steps(request, card, self.least_steps)
        check_extra(request.extra_params, self.numbers, self.switches)
        return request
