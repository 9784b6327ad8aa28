# SPDX-License-Identifier: Apache-2.0
"""ParameterServer: wrong arguments, values and updates are errors of all ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import farandole as hvd
from farandole.extras.parameter_server import shard
from harness.joins import in_turns

several = pytest.mark.ranks(2, 3, 4)


def refuse(_old: Any, _values: Any) -> Any:
    raise KeyError("no update")


def in_place(old: Any, values: Any) -> Any:
    old -= values  # and returns nothing, which NumPy would write as NaN


@several
@pytest.mark.parametrize("update", [refuse, in_place, lambda old, _: old[:, :0]])
def test_an_update_that_fails_is_an_error_of_all_who_read(update: Any) -> None:

    def work() -> None:
        with hvd.ParameterServer((hvd.size(), 1), update=update) as server:
            server.push([0], [[1.0]])
            server.clock()
            server.pull()

    expected = (KeyError, ValueError) if hvd.rank() == 0 else hvd.FarandoleError
    with pytest.raises(expected, match=r"no update|update returned|rank 0 (can't|no longer) serve"):
        work()
    hvd.barrier()


@several
@pytest.mark.parametrize("pusher", [0, 1], ids=["its own rank pushes", "another one pushes"])
def test_an_update_that_fails_is_an_error_of_those_who_only_push(pusher: int) -> None:

    def work() -> None:
        with hvd.ParameterServer((hvd.size(), 1), update=refuse, staleness=None) as server:
            if hvd.rank() == pusher:
                server.push([0], [[1.0]])
            others = np.arange(1, hvd.size())
            while not server._shard.failure:
                server.clock()
            server.push(others, np.ones((len(others), 1)))

    expected = KeyError if hvd.rank() == 0 else hvd.PeerError
    with pytest.raises(expected, match=r"no update|rank 0 no longer serves its part"):
        work()
    hvd.barrier()


@several
def test_a_push_that_fails_where_the_worker_has_left_is_an_error_of_the_pusher() -> None:
    """Rank 0's server reports nothing any more, and rank 1 never pulls."""

    def update(old: Any, values: Any) -> Any:
        raise KeyError("no such row")

    server, left = hvd.ParameterServer((hvd.size(),), "float64", update=update), float("inf")
    if hvd.rank() == 1:
        with server._shard.changed:
            server._shard.changed.wait_for(lambda: server.clocks[0] == left)
        server.push([0], [1.0])
        with pytest.raises(hvd.FarandoleError, match="rank 0 can't serve its rows"):
            server.close()
    elif hvd.rank() == 0:
        with pytest.raises(KeyError, match="no such row"):
            server.close()
    else:
        server.close()
    hvd.barrier()


def test_a_failed_part_is_reported_before_its_rank_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's worker leaves after the failure, and before its server could report that."""
    report, left = shard.ShardServer.report_failure, float("inf")

    def late(server: shard.ShardServer) -> None:
        part = server._shard
        if threading.current_thread() is server:
            with part.changed:
                part.changed.wait_for(lambda: part.clocks[server._rank] == left)
        report(server)

    monkeypatch.setattr(shard.ShardServer, "report_failure", late)

    def work() -> None:
        with hvd.ParameterServer((hvd.size(), 1), update=refuse, staleness=None) as server:
            part = server._shard
            if hvd.rank() == 1:
                server.push([0], [[1.0]])
            with part.changed:
                part.changed.wait_for(lambda: part.failure or part.clocks[0] == left)
            server.clock()

    with pytest.raises(KeyError if hvd.rank() == 0 else hvd.PeerError):
        work()
    hvd.barrier()


@several
@in_turns
def test_who_has_joined_can_hold_no_rows(active: list[int]) -> None:
    gone = next(rank for rank in range(hvd.size()) if rank not in active)
    with pytest.raises(ValueError, match=rf"rank {gone} has joined and can't hold its rows"):
        hvd.ParameterServer((hvd.size(), 1))


def fails(_rows: Any) -> Any:
    raise KeyError("no first values")


WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"shape": value}, "shape is") for value in ((), (0, 3), (2.5,), [True], 5, None, "ab")),
    *(({"dtype": value}, "dtype is") for value in ("complex64", "bool", None, "no", object())),
    *(({"staleness": value}, "staleness is") for value in (-1, True, 1.5, "2", [1])),
    *(({"update": value}, "update is") for value in ("sub", None, np.ones(2))),
    *(({"initial": value}, "initial is") for value in ("a", None, float("nan"), object())),
    ({"initial": fails}, "no first values"),
    ({"initial": lambda _rows: None}, "initial values are object"),
    ({"dtype": "int32", "initial": 0.5}, "initial values are float64"),
    ({"initial": lambda rows: np.ones((len(rows) + 2, 7))}, "could not broadcast"),
    ({"initial": lambda _rows: np.ones(1)}, "array of shape (1,) for rows of"),
    *(({"process_set": value}, "process_set is") for value in (None, 3, "all")),
]


def test_wrong_arguments_of_one_rank_are_told_to_all() -> None:
    last = hvd.size() - 1
    for arguments, text in WRONG:
        right = {"shape": (5, 2), "staleness": 1}
        given = {**right, **arguments} if hvd.rank() == last else right
        with pytest.raises((ValueError, TypeError, KeyError, hvd.FarandoleError)) as raised:
            hvd.ParameterServer(**given)
        said = str(raised.value)
        assert text in said, (arguments, said)
        assert hvd.rank() == last or f"rank {last}" in said, (arguments, said)
    with hvd.ParameterServer((5, 1)) as server:  # the ranks agree again about the next one
        server.push(None, np.ones((5, 1)))
        server.clock()
        assert (server.pull() == hvd.size()).all()


@several
@pytest.mark.parametrize("arguments", [{"shape": (5, 3)}, {"initial": 1}, {"update": np.subtract}])
def test_ranks_that_disagree(arguments: dict[str, Any]) -> None:
    with pytest.raises(hvd.MismatchError, match=r"rank \d creates it with"):
        hvd.ParameterServer(**{"shape": (5, 2), **(arguments if hvd.rank() == 1 else {})})


def test_values_that_an_integer_table_cannot_hold() -> None:
    with hvd.ParameterServer((5,), "uint8") as server:
        for value in (0.5, -1, 256, float("nan")):
            with pytest.raises(ValueError, match="which a table of uint8 can't hold"):
                server.push([1], [value])
        server.push([1], [7])
        server.clock()
        assert server.pull().tolist() == [0, 7 * hvd.size(), 0, 0, 0]


def test_wrong_pushes_and_pulls_change_nothing() -> None:
    with hvd.ParameterServer((5, 2)) as server:
        for rows in ([5], [-1], [[1]], ["a"], [0.5]):
            with pytest.raises(ValueError, match=r"rows are of shape|has rows 0 to 4, not (5|-1)"):
                server.pull(rows)
        with pytest.raises(ValueError, match=r"shape \(2,\); for 1 rows .* pass \(1, 2\)"):
            server.push([1], [1.0, 2.0])
        for values, text in ((1j, "complex128"), ("a", "<U1"), (None, "object")):
            with pytest.raises(ValueError, match=rf"values are {text}, which a table of float32"):
                server.push([1], [[values, values]])
        server.clock()
        assert (server.pull() == 0).all()
    with pytest.raises(ValueError, match="closed"):
        server.pull()
