# SPDX-License-Identifier: Apache-2.0
"""At which world sizes the files of tests/parallel and tests/gpu run where --ranks names none.

A number of ranks is worth its time where the product counts ranks. Adapters, names, handles and
errors do not: a rank alone goes its own way, and three show all of the other one. Four ranks run in
CI only. Each size of with_jax and with_tensorflow imports a framework. --ranks and --hosts run any
file at any size that its own marks allow.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["marks", "own_sizes", "sizes_of"]

ALL = (1, 2, 3, 4)
POSSIBLE = {"parallel": ALL, "gpu": (1, 2, 4), "with_jax": ALL, "with_tensorflow": ALL}  # by folder
USUAL = (1, 3)

# Sizes, those of CI too, files, and why not the usual ones.
TABLE: tuple[tuple[tuple[int, ...], tuple[int, ...], str, str], ...] = (
    (
        (1, 2, 3),
        (4,),
        "adasum elastic join lifecycle parameter_server process_sets torch_optimizer uneven",
        "blocks, stripes, halving, sets and own states come out differently for each",
    ),
    (
        (2, 3),
        (4,),
        "horovod_defects join_rows torch_join torch_sparse",
        "so were the defects that they remember",
    ),
    ((2, 3), (4,), "point_to_point", "rings, pairs that share a rank, and pairs that do not"),
    (
        (2,),
        (4,),
        "call_sites errors gpu_table leases parameter_server_refuses",
        "halves disagree, and one of many; NCCL rounds a third in its own way",
    ),
    ((3,), (4,), "disagreements", "a set without one of the ranks, and halves"),
    (
        (1, 2),
        (),
        "float8 gpu_arrays prepared torch_strangers torch_workers tune",
        "a pair will do",
    ),
    (
        (2,),
        (),
        "arguments bench torch_complex torch_distributed_ddp torch_kept torch_restart "
        "torch_wrappers",
        "one rank is wrong, one hears of it",
    ),
    ((2,), (), "gpu_torch", "NCCL rounds a third in its own way"),
    ((1,), (), "public", "its examples are of a world of one"),
    (
        (3,),
        (),
        "torch_distributed torch_distributed_groups torch_distributed_messages torch_ordinary",
        "alone, nothing is reduced",
    ),
    (
        (2, 3),
        (),
        "memory_in_use small_calls torch_distributed_memory torch_distributed_small "
        "torch_functions",
        "a pair, and ranks that differ",
    ),
    (
        (3,),
        (2,),
        "torch_bad_input torch_interrupts torch_names torch_writable",
        "one rank goes wrong, and all others hear of it",
    ),
)

# Among a file's own marks: `pytestmark = ...`, or a line of its list.
_OWN = re.compile(r"^(?:pytestmark = \[?|    )pytest\.mark\.ranks\(([\d, ]+)\)", re.MULTILINE)
_ANY = re.compile(r"pytest\.mark\.ranks\(([\d, ]+)\)")


def sizes_of(path: Path, ci: bool = bool(os.environ.get("CI"))) -> tuple[int, ...]:
    """Where none are asked for; `ci`: those of CI."""
    own = own_sizes(path)
    if path.parent.name.startswith("with_"):
        return tuple(size for size in own if size in USUAL) or own
    if path.parent.name != "parallel":
        return own
    for sizes, more, files, _ in TABLE:
        if path.stem.removeprefix("test_") in files.split():
            return (*sizes, *more) if ci else sizes
    return USUAL


def own_sizes(path: Path) -> tuple[int, ...]:
    """All that the file's `pytestmark` allows."""
    own = _OWN.search(path.read_text())
    return _numbers(own[1]) if own else POSSIBLE[path.parent.name]


def marks(path: Path) -> list[tuple[int, ...]]:
    """The sizes of each mark in a file, of some of its tests or of all."""
    return [_numbers(found) for found in _ANY.findall(path.read_text())]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
