# SPDX-License-Identifier: Apache-2.0
"""Flight recorders, traces, metrics and stacks of a job."""
