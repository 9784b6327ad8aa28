# SPDX-License-Identifier: Apache-2.0
"""Makes torch.distributed's name "gloo" mean farandole, in the suite's processes and all that they
start: an entry point of torch in the suite's environment. Gloo itself raises."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

_OURS = "farandole"


def start() -> None:
    """For torch, at the end of its import. Each group that is made is a line of the file of
    CLIENT_GROUPS: what serves it."""
    record = os.environ.get("CLIENT_GROUPS")
    if record is None:
        return
    core = dist.distributed_c10d
    make, name_of = core._new_process_group_helper, core.get_backend

    @wraps(make)
    def helper(size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        if str(backend) in ("gloo", "undefined", "None"):
            backend = core.Backend(_OURS)
        made = make(size, rank, ranks, backend, *rest, **options)
        if isinstance(made[0], dist.ProcessGroup):
            kind = type(made[0])
            with Path(record).open("a") as file:
                file.write(f"{kind.__module__}.{kind.__qualname__} {made[0].size()}\n")
        return made

    @wraps(name_of)
    def get_backend(group: Any = None) -> Any:
        name = name_of(group)
        return core.Backend("gloo") if name == _OURS else name

    class Gloo(core.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("gloo itself was to be used")

    core._new_process_group_helper = helper
    core.get_backend = dist.get_backend = get_backend
    core.ProcessGroupGloo = dist.ProcessGroupGloo = Gloo
