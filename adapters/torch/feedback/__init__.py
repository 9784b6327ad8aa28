# SPDX-License-Identifier: Apache-2.0
"""Compressors with error feedback, and how gradients are sent by them."""
