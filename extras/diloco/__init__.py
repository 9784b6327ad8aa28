# SPDX-License-Identifier: Apache-2.0
"""DiLoCo."""

from farandole.extras.diloco.diloco import DiLoCo

__all__ = ["DiLoCo"]
