# SPDX-License-Identifier: Apache-2.0
"""How each diffusers pipeline is served. Importing this pulls in no torch."""
