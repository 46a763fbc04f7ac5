# SPDX-License-Identifier: Apache-2.0
"""The HTTP server. Importing it never imports torch."""
