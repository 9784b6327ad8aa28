# SPDX-License-Identifier: Apache-2.0
"""The subcommands of `farandole`, such as bench, config, doctor, run and tune."""
