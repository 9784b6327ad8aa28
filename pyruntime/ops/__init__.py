# SPDX-License-Identifier: Apache-2.0
"""The neutral collectives, public calls for any thread: arrays of any kind in, arrays of the same
kind out.

`x` waits, `x_async` returns a handle, a trailing underscore means in place, `grouped_x` takes a
list. A wrong argument on one rank is an error on all: the peers of such a call fail too instead of
waiting.
"""

from farandole.calls.arguments import ReduceOp as ReduceOp
from farandole.ops.broadcasts import *  # noqa: F403
from farandole.ops.exchanges import *  # noqa: F403
from farandole.ops.gathers import *  # noqa: F403
from farandole.ops.meetings import *  # noqa: F403
from farandole.ops.reductions import *  # noqa: F403
from farandole.ops.starts import Adasum as Adasum
from farandole.ops.starts import Average as Average
from farandole.ops.starts import Max as Max
from farandole.ops.starts import Min as Min
from farandole.ops.starts import Product as Product
from farandole.ops.starts import Sum as Sum
