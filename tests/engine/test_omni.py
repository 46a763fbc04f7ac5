# SPDX-License-Identifier: Apache-2.0
"""The offline way in: one object, pictures as people have them, and nothing left behind."""

import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.engines import picture
from tests.engine.processes import children, until
from vllm_omni_vae import DiffusionParallelConfig, Omni
from vllm_omni_vae.config import VaeConfig
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError, EngineError, RequestError

pytestmark = pytest.mark.distributed

SMALL: dict[str, Any] = {"width": 64, "height": 64, "num_frames": 5, "num_inference_steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def omni(checkpoints: Mapping[str, Path]) -> Iterator[Omni]:
    before = children()
    with Omni(
        model=str(checkpoints["wan2.2-ti2v-5b"]),
        vae_use_tiling=True,
        vae_tile_size="64x64",
        vae_tile_stride="48x48",
        dtype="float32",
        seed=11,
    ) as omni:
        yield omni
        assert len(children() - before) == 1
    assert children() == before
    with pytest.raises(EngineError, match="takes no jobs: stopped"):
        omni.generate("a boat", **SMALL)
    omni.close()


def test_a_clip_of_text(omni: Omni) -> None:
    clip = omni.generate("a boat", **SMALL)
    assert (clip.frames.shape, clip.fps, clip.seed) == ((5, 64, 64, 3), 24, 3)
    assert [decision["operation"] for decision in clip.decisions] == ["decode"]
    assert omni.generate("a boat", **SMALL).frames.tobytes() == clip.frames.tobytes()
    assert omni.generate("a hill", **SMALL).frames.tobytes() != clip.frames.tobytes()


def test_a_clip_of_a_picture_in_any_form(omni: Omni) -> None:
    pixels = picture(64, 64)
    clips = [
        omni.generate("a boat", image=image, **SMALL)
        for image in (pixels, Image.fromarray(pixels), Image.fromarray(pixels).convert("RGBA"))
    ]
    clips.append(omni.generate("a boat", images=[pixels], **SMALL))
    assert [decision["operation"] for decision in clips[0].decisions] == ["encode", "decode"]
    assert len({clip.frames.tobytes() for clip in clips}) == 1
    assert omni.generate("a boat", image=picture(64, 64, seed=1), **SMALL).frames.tobytes() != clips[0].frames.tobytes()


def test_the_engine_s_seed_is_used_where_none_is_given(omni: Omni) -> None:
    clip = omni.generate("a boat", **SMALL | {"seed": None})
    assert clip.seed == 11


def test_what_the_model_cannot_make_is_refused(omni: Omni) -> None:
    with pytest.raises(RequestError, match="nearest: 64 or 96"):
        omni.generate("a boat", **SMALL | {"width": 80})


@pytest.mark.parametrize(
    "pixels", [np.zeros((64, 64), np.uint8), np.zeros((64, 64, 4), np.uint8), np.zeros((64, 64, 3))]
)
def test_what_is_no_picture_is_refused(pixels: Any, omni: Omni) -> None:
    with pytest.raises((RequestError, ConfigurationError), match=r"\(H, W, 3\) uint8"):
        omni.generate("a boat", image=pixels, **SMALL)


def test_two_names_for_one_thing_are_refused(omni: Omni) -> None:
    with pytest.raises((RequestError, ConfigurationError, TypeError)):
        omni.generate("a boat", image=picture(64, 64), images=[picture(64, 64)], **SMALL)


@pytest.mark.parametrize(
    "settings",
    [
        {"vae_use_tilling": True},
        {"parallel": DiffusionParallelConfig(vae_patch_parallel_size=2)},
        {"vae": VaeConfig(vae_use_tiling=True)},
        {"vae_patch_parallel_size": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_would_do_nothing_is_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigurationError, match=rf"Omni has no setting {name}; it has "):
        Omni("no-such-model", **settings)


def test_what_is_no_checkpoint_is_refused_before_any_process(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ConfigurationError, match="is no diffusers checkpoint"):
        Omni(str(tmp_path))
    assert children() == before


def test_an_interrupted_start_leaves_no_process(
    checkpoints: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the model loads: nobody holds an `Omni` then that could be closed."""
    started: list[Engine] = []

    class Noted(Engine):
        def start(self) -> None:
            started.append(self)
            super().start()

    monkeypatch.setattr("vllm_omni_vae.engine.omni.Engine", Noted)
    before = children()

    def interrupt() -> None:
        until(lambda: started and started[0].worker_pids)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Omni(str(checkpoints["wan2.2-t2v"]))
        until(lambda: children() == before)
        assert started[0].wait() is None
    finally:
        thread.join()
        started[0].close()
