# SPDX-License-Identifier: Apache-2.0
"""The `farandole` command: bench, check, doctor, tune."""
