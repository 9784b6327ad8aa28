# SPDX-License-Identifier: Apache-2.0
"""`farandole check`: right where all is well, and no wrong result escapes it."""

import sys

import numpy as np
import pytest

from farandole.tools import check
from harness.mpirun import mpirun

CALLS = [
    "allreduce",
    "allreduce_",
    "reducescatter",
    "allgather",
    "alltoall",
    "broadcast",
]
PROGRAM = """
import sys
import farandole as fd
from farandole.tools import check, cli

def planted(start):
    def changed(array, *rest, **more):
        if fd.rank() == 1:
            array[-1:] = 1 - array[-1:]
        return start(array, *rest, **more)
    return changed

assert cli.main(["check"]) == 0
check.DTYPES = ["float32"]
for what in sys.argv[1:]:
    name = what.rstrip("_") + "_async" + "_" * what.endswith("_")
    start = getattr(fd, name)
    setattr(fd, name, planted(start))
    assert cli.main(["check"]) == 1
    setattr(fd, name, start)
"""


def test_a_wrong_element_is_found_where_it_is(tmp_path):
    """Rank 1 changes one element of what it sends to one collective, which is the root's part of
    most scatters and broadcasts."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = mpirun([sys.executable, str(program), *CALLS], 2, timeout=120).check().out
    tables = out.split("collective ")[1:]
    for table, planted in zip(tables, ["", *CALLS], strict=True):
        rows = [row.split() for row in table.splitlines()[1:] if " wrong result" not in row]
        assert {row[0] for row in rows} == set(CALLS)
        assert {row[0] for row in rows if row[-1] != "right"} == {planted} - {""}, table


@pytest.mark.parametrize("op", ["Sum", "Product", "Min", "Max"])
@pytest.mark.parametrize("size", [2, 26, 300])
def test_no_dtype_overflows_or_rounds_at_many_ranks(op, size):
    for dtype in check.DTYPES:
        if op in check._OPS.get(np.dtype(dtype).kind, check._UFUNCS):
            rows = check._periods(dtype, op, size)
            assert not (rows == rows[0]).all()
            wide = rows.astype({"b": "?", "c": "c16"}.get(rows.dtype.kind, "f8"))
            narrow = check._UFUNCS[op].reduce(rows, axis=0, dtype=dtype)
            assert (narrow == check._UFUNCS[op].reduce(wide, axis=0)).all()
            assert len(np.unique(narrow)) > 1, (dtype, op)
