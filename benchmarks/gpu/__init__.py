# SPDX-License-Identifier: Apache-2.0
"""One run that checks and times everything on the accelerators of a machine; see `run`."""
