# SPDX-License-Identifier: Apache-2.0
"""Simulated hosts, networks and time."""
