# SPDX-License-Identifier: Apache-2.0
"""The path of gradients, from autograd's hooks to the optimizer's step. For optimizers."""
