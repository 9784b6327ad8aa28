# SPDX-License-Identifier: Apache-2.0
"""The parts of a collective call: its arguments, submission to the core, memory and handle."""
