# SPDX-License-Identifier: Apache-2.0
"""Tests of farandole.tensorflow run inside ranks, as those of tests/parallel do;
`make test-tensorflow`."""

import os

if "FARANDOLE_TEST_STEP" in os.environ:  # in a rank; before TensorFlow is imported
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import pytest
    import tensorflow as tf

    # So that nodes in another order would deadlock. (Variables are gone after the first file.)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    from harness.inner import runtime as runtime

    @pytest.fixture(params=["eager", "function"])
    def within(request):
        """Runs a function of tensors as it is, or as a graph."""
        return tf.function if request.param == "function" else lambda function: function
