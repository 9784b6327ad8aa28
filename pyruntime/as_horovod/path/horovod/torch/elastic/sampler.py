# SPDX-License-Identifier: Apache-2.0
"""A sampler that continues from the last commit."""

from farandole.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
