# SPDX-License-Identifier: Apache-2.0
"""ParameterServer."""

from farandole.extras.parameter_server.worker import ParameterServer

__all__ = ["ParameterServer"]
