# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(shard_state=True): each rank updates and keeps a part of every parameter."""
