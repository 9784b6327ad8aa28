# SPDX-License-Identifier: Apache-2.0
"""The errors by Horovod's names."""

from farandole.errors import FarandoleError as HorovodInternalError
from farandole.errors import HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
