# SPDX-License-Identifier: Apache-2.0
"""One collective call: arguments, submission to the core, memory and handle."""
