# SPDX-License-Identifier: Apache-2.0
"""The collectives on torch tensors, by kind of call. farandole.torch shows what is public."""
