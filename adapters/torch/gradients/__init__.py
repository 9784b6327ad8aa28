# SPDX-License-Identifier: Apache-2.0
"""The road of gradients, from autograd's hooks to the step that uses them. For optimizers."""
