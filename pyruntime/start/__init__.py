# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find each other, and how one of them leaves."""
