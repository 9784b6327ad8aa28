# SPDX-License-Identifier: Apache-2.0
"""Describes every framework's arrays to the core and wraps memory that the core lends."""
