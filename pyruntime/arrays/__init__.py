# SPDX-License-Identifier: Apache-2.0
"""Describes arrays of every framework to the core, and wraps memory that the core lends."""
