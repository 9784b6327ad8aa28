# SPDX-License-Identifier: Apache-2.0
"""horovod.torch.elastic: commit, restore and sync."""

from farandole.torch.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
