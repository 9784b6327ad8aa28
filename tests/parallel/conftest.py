# SPDX-License-Identifier: Apache-2.0
"""Every test finds the runtime up, and leaves no sleeper that only its safety timeout woke."""

from harness.inner import runtime as runtime
