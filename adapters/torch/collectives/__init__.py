# SPDX-License-Identifier: Apache-2.0
"""The collectives on torch tensors, where they differ from those of farandole.ops."""
