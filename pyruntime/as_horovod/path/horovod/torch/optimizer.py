# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer of horovod.torch."""

from farandole.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
