# SPDX-License-Identifier: Apache-2.0
"""How arrays of every framework are described to the core, and memory that the core lends."""
