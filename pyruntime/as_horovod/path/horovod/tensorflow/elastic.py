# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow.elastic: states that commit, restore and sync."""

from farandole.tensorflow.elastic import TensorFlowKerasState, TensorFlowState, run

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
