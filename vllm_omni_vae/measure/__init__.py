# SPDX-License-Identifier: Apache-2.0
"""Run an autoencoder in every way that its work can be shared, on processes as ranks, and time and compare the ways."""
