# SPDX-License-Identifier: Apache-2.0
"""Reads flight recorders, traces, metrics and stacks of a job."""
