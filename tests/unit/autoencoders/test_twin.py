# SPDX-License-Identifier: Apache-2.0
"""What a call would return is found out without values, by several threads at a time as well."""

from concurrent.futures import ThreadPoolExecutor

from tests.helpers.other_vaes import OTHERS
from vllm_omni_vae.autoencoders import Operation
from vllm_omni_vae.autoencoders.twin import plan


def test_threads_take_turns_on_a_twin() -> None:
    """The network of this class keeps frames on itself, and takes them off again at the end of a call."""
    vae = OTHERS["magvit"].made()
    channels = vae.config.latent_channels
    shapes = [(1, channels, 2, 4 + n % 5, 4 + n // 5) for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        plans = list(threads.map(lambda shape: plan(vae, type(vae), Operation.DECODE, shape, (), {}), shapes))
    sizes = [(found.shape[-2], found.shape[-1]) for found in plans]
    assert sizes == [(8 * height, 8 * width) for *_, height, width in shapes]
