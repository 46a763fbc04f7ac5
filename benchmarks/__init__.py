# SPDX-License-Identifier: Apache-2.0
"""What sharing a VAE among ranks costs and gains, measured through the public interface alone."""
