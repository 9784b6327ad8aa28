# SPDX-License-Identifier: Apache-2.0
"""Collectives on torch tensors that farandole.ops lacks: differentiable and sparse collectives."""
