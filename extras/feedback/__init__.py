# SPDX-License-Identifier: Apache-2.0
"""Compressors with error feedback, and how gradients are sent by them."""

from farandole.extras.feedback.compressor import FeedbackCompressor
from farandole.extras.feedback.compressors import Int8, OneBit, PowerSGD, TopK

__all__ = ["FeedbackCompressor", "Int8", "OneBit", "PowerSGD", "TopK"]
