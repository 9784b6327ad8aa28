# SPDX-License-Identifier: Apache-2.0
"""Packages that stand on farandole's public names and its extension points, and on nothing else."""
