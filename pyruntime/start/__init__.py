# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of a job, and leaves it."""
