# SPDX-License-Identifier: Apache-2.0
"""Public collectives on arrays of any kind. They return arrays of the same kind and may be called
from any thread.

`x` waits, whereas `x_async` returns a handle. A trailing underscore means in place. `grouped_x`
takes a list. If one rank passes a wrong argument, all ranks raise an error instead of waiting.
"""

from farandole.calls.arguments import ReduceOp as ReduceOp
from farandole.ops.barriers import *  # noqa: F403
from farandole.ops.broadcasts import *  # noqa: F403
from farandole.ops.exchanges import *  # noqa: F403
from farandole.ops.gathers import *  # noqa: F403
from farandole.ops.reductions import *  # noqa: F403
from farandole.ops.starts import Adasum as Adasum
from farandole.ops.starts import Average as Average
from farandole.ops.starts import Max as Max
from farandole.ops.starts import Min as Min
from farandole.ops.starts import Product as Product
from farandole.ops.starts import Sum as Sum
