# SPDX-License-Identifier: Apache-2.0
"""Distributed autoencoders: diffusers' own classes, whose encode and decode are shared among ranks."""

from .compare import Comparison, compare
from .distribute import FAMILIES, distribute, distributed_class, families_by_name
from .flux2 import DistributedAutoencoderKLFlux2
from .kl import DistributedAutoencoderKL
from .ltx2 import DistributedAutoencoderKLLTX2Video
from .ltx2_diffusion import DistributedLTX2VideoDiffusionDecoderModel
from .mixin import DistributedVaeMixin
from .policy import Decision, Strategy, select_strategy
from .qwen_image import DistributedAutoencoderKLQwenImage, DistributedAutoencoderKLQwenImage21
from .selftest import selftest
from .spec import FamilySpec, Operation
from .state import ParallelState, Rendezvous
from .wan import DistributedAutoencoderKLWan

__all__ = [
    "FAMILIES",
    "Comparison",
    "Decision",
    "DistributedAutoencoderKL",
    "DistributedAutoencoderKLFlux2",
    "DistributedAutoencoderKLLTX2Video",
    "DistributedAutoencoderKLQwenImage",
    "DistributedAutoencoderKLQwenImage21",
    "DistributedAutoencoderKLWan",
    "DistributedLTX2VideoDiffusionDecoderModel",
    "DistributedVaeMixin",
    "FamilySpec",
    "Operation",
    "ParallelState",
    "Rendezvous",
    "Strategy",
    "compare",
    "distribute",
    "distributed_class",
    "families_by_name",
    "select_strategy",
    "selftest",
]
