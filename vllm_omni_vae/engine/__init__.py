# SPDX-License-Identifier: Apache-2.0
"""The queue of jobs and the supervision of the ranks."""
