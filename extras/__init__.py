# SPDX-License-Identifier: Apache-2.0
"""Optional features on top of the adapters. farandole and farandole.torch export them."""
