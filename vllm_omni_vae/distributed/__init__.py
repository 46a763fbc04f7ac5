# SPDX-License-Identifier: Apache-2.0
"""Transport between ranks. Nothing here knows what a model is."""

from .agreement import agree, agree_on, fingerprint
from .communicator import Communicator, NullCommunicator, TorchCommunicator, Traffic
from .groups import VaeGroups
from .local import LocalCommunicator, LocalWorld

__all__ = [
    "Communicator",
    "LocalCommunicator",
    "LocalWorld",
    "NullCommunicator",
    "TorchCommunicator",
    "Traffic",
    "VaeGroups",
    "agree",
    "agree_on",
    "fingerprint",
]
