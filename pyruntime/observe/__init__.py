# SPDX-License-Identifier: Apache-2.0
"""What a job did: flight recorders, traces, metrics, stacks."""
