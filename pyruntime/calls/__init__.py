# SPDX-License-Identifier: Apache-2.0
"""The parts of one collective call: arguments, submission to the core, memory and handle."""
