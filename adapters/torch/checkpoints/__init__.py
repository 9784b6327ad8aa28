# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole job in one file, and a loader whose place they keep."""
