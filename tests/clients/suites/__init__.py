# SPDX-License-Identifier: Apache-2.0
"""One file a client, each with its SUITES."""
