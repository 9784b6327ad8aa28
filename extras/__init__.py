# SPDX-License-Identifier: Apache-2.0
"""Packages that stand on the others: farandole and farandole.torch show them to users."""
