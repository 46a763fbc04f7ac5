# SPDX-License-Identifier: Apache-2.0
"""Distributed autoencoders: diffusers' own classes, whose encode and decode are shared among ranks."""

from .distribute import FAMILIES, distribute, distributed_class
from .mixin import DistributedVaeMixin
from .policy import Decision, Strategy, select_strategy
from .spec import FamilySpec, Operation
from .state import ParallelState, Rendezvous
from .wan import DistributedAutoencoderKLWan

__all__ = [
    "FAMILIES",
    "Decision",
    "DistributedAutoencoderKLWan",
    "DistributedVaeMixin",
    "FamilySpec",
    "Operation",
    "ParallelState",
    "Rendezvous",
    "Strategy",
    "distribute",
    "distributed_class",
    "select_strategy",
]
