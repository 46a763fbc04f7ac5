# SPDX-License-Identifier: Apache-2.0
"""Which models are diffusers checkpoints, told by their ``model_index.json`` without loading anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from .pipelines.profile import PipelineProfile

INDEX = "model_index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A diffusers checkpoint on this machine.

    Attributes:
        model: The folder or hub name it was found by.
        folder: Folder that holds its ``model_index.json``; of a hub model there may be no other file yet.
        pipeline_class: ``_class_name`` of ``model_index.json``.
    """

    model: str
    folder: Path
    pipeline_class: str

    def profile(self, run_as: str | None = None) -> PipelineProfile:
        """Return the profile that serves this checkpoint.

        Args:
            run_as: The pipeline class to run it as; None for the one that its index names.

        Raises:
            UnsupportedError: no profile runs its pipeline class, or runs it as that; the message names what there is.
        """
        from .pipelines.registry import classes_for, find_profile, registered

        asked = run_as or self.pipeline_class
        profile = find_profile(asked)
        if profile is None or not profile.fits(asked, self.pipeline_class):
            possible = classes_for(self.pipeline_class)
            if run_as is not None and possible:
                raise UnsupportedError(
                    f"--model-class-name {run_as}: {self.model} is a {self.pipeline_class} checkpoint, which can be "
                    f"run as {', '.join(possible)}; choose one of them, or leave the flag out"
                )
            raise UnsupportedError(
                f"{self.model} is a {self.pipeline_class} checkpoint, which cannot be served; "
                f"choose a checkpoint of one of {', '.join(registered())}"
            )
        return profile


def find(
    model: str, *, revision: str | None = None, cache_dir: str | None = None, online: bool = False
) -> Checkpoint | None:
    """Return ``model`` as a diffusers checkpoint, or None if it is something else.

    A local folder is looked at first, then the hub's cache on this machine. No network access unless ``online``.

    Args:
        model: Local folder or name on the hub.
        revision: Branch, tag or commit of a hub model.
        cache_dir: The hub's cache; None for its usual place.
        online: Ask the hub about a model that is not in the cache.

    Raises:
        ConfigurationError: ``model_index.json`` is unreadable, or the hub could not say whether it exists.
    """
    if Path(model).is_dir():
        index: Path | None = Path(model, INDEX)
    else:
        index = _cached(model, revision, cache_dir)
        if index is None and online:
            index = _downloaded(model, revision, cache_dir)
    if index is None or not index.is_file():
        return None
    return Checkpoint(model, index.parent, _pipeline_class(index))


def require(model: str, *, revision: str | None = None, cache_dir: str | None = None) -> Checkpoint:
    """Return ``model`` as a diffusers checkpoint, asking the hub where needed (arguments as for `find`).

    Raises:
        ConfigurationError: it is none, or that could not be found out.
    """
    checkpoint = find(model, revision=revision, cache_dir=cache_dir, online=True)
    if checkpoint is None:
        raise ConfigurationError(
            f"{model} is no diffusers checkpoint: there is no {INDEX} in it; "
            "give a local folder or the name of a hub model that has one"
        )
    return checkpoint


def descriptions(found: Checkpoint, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return a folder with every JSON file of ``found``; those of a hub model are fetched if need be."""
    if Path(found.model).is_dir():
        return found.folder
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*/*.json"]
    return Path(snapshot_download(found.model, revision=revision, cache_dir=cache_dir, allow_patterns=patterns))


def _cached(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, INDEX, revision=revision, cache_dir=cache_dir)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def _downloaded(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, INDEX, revision=revision, cache_dir=cache_dir))
    except LocalEntryNotFoundError as error:
        raise _unreachable(model, error) from None
    except (EntryNotFoundError, HFValidationError):
        return None
    except OSError as error:
        raise _unreachable(model, error) from None


def _unreachable(model: str, error: OSError) -> ConfigurationError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigurationError(
        f"{model} is no local folder, and the hub could not be asked about it ({reason}); "
        "check the name, the network and the access token, or give a local folder"
    )


def _pipeline_class(index: Path) -> str:
    from .pipelines.profile import index_class

    try:
        return index_class(json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {index}: {error}") from None
    except (KeyError, TypeError):
        raise ConfigurationError(f"{index} names no pipeline: it has no _class_name") from None
