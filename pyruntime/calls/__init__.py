# SPDX-License-Identifier: Apache-2.0
"""One collective call: its arguments, its way into the core, what keeps its memory, its handle."""
