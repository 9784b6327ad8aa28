# SPDX-License-Identifier: Apache-2.0
"""A sampler that goes on where the last commit was."""

from farandole.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
