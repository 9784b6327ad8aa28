# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch tensors that differ from farandole.ops: differentiable and sparse ones."""
