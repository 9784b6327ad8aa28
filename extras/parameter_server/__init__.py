# SPDX-License-Identifier: Apache-2.0
"""ParameterServer, a table that all ranks update and read at their own pace."""

from farandole.extras.parameter_server.worker import ParameterServer

__all__ = ["ParameterServer"]
