# SPDX-License-Identifier: Apache-2.0
"""The `farandole` command: bench, config, doctor, run, tune."""
