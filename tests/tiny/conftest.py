# SPDX-License-Identifier: Apache-2.0
"""No test here may reach a model hub; huggingface_hub reads the variable when it is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
