# SPDX-License-Identifier: Apache-2.0
"""Observing a job: flight recorders, traces, metrics, stacks."""
