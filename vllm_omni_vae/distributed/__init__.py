# SPDX-License-Identifier: Apache-2.0
"""Transport between ranks. Nothing here knows what a model is."""

from .agreement import agree, agree_on, fingerprint
from .communicator import Communicator, NullCommunicator, TorchCommunicator, Traffic
from .groups import VaeGroups
from .local import LocalCommunicator, LocalWorld
from .out_of_memory import asked_for, give_back, is_out_of_memory
from .span import span
from .staged import StagedCommunicator

__all__ = [
    "Communicator",
    "LocalCommunicator",
    "LocalWorld",
    "NullCommunicator",
    "StagedCommunicator",
    "TorchCommunicator",
    "Traffic",
    "VaeGroups",
    "agree",
    "agree_on",
    "asked_for",
    "fingerprint",
    "give_back",
    "is_out_of_memory",
    "span",
]
