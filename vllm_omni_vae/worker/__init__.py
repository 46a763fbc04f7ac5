# SPDX-License-Identifier: Apache-2.0
"""Rank processes and what they say to their engine."""
