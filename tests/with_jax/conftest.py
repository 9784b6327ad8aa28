# SPDX-License-Identifier: Apache-2.0
"""Tests of farandole.jax run inside ranks, as those of tests/parallel do; `make test-jax`."""

import os

if "FARANDOLE_TEST_STEP" in os.environ:  # in a rank; before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import pytest

    from harness.inner import runtime as runtime

    @pytest.fixture(params=["outside", "jit"])
    def within(request):
        """Runs a function of arrays as it is, or compiled."""
        return jax.jit if request.param == "jit" else lambda function: function
