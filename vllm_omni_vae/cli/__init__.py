# SPDX-License-Identifier: Apache-2.0
"""The command line: each module is one subcommand of ``vllm-omni-vae``."""
