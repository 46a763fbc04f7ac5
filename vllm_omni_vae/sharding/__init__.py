# SPDX-License-Identifier: Apache-2.0
"""One feature map spread over ranks, with the unmodified network running on each piece."""

from .layout import ShardLayout
from .spatial_shard import SpatialShard

__all__ = ["ShardLayout", "SpatialShard"]
