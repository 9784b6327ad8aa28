# SPDX-License-Identifier: Apache-2.0
"""An adapter that is no part of farandole: found by its entry point; its arrays are immutable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole.arrays import kinds

FRAMEWORK = '''
import numpy as np


class Frozen:
    """Values that never change, as JAX's."""

    def __init__(self, values):
        self._values = np.array(values)
        self._values.flags.writeable = False

    def read(self):
        return self._values
'''

ADAPTER = '''
import numpy as np
from frozen import Frozen

from farandole.arrays.buffers import Buffer, address_or_empty, code_of
from farandole.arrays.kinds import Kind, register


class FrozenKind(Kind):
    """Frozen arrays, on the CPU."""

    def matches(self, x):
        return isinstance(x, Frozen)

    def describe(self, x, in_place=False):
        if in_place and isinstance(x, Frozen):
            raise ValueError("a Frozen array can't be changed in place; use the out-of-place call")
        values = x.read() if isinstance(x, Frozen) else x  # what empty() made
        values = values if values.flags.c_contiguous else values.copy(order="C")
        pointer = address_or_empty(values.ctypes.data, values.shape, "a Frozen array")
        return Buffer(pointer, code_of(values.dtype), values.shape, values)

    def empty(self, like, shape=None):
        values = like.read()
        return np.empty(values.shape if shape is None else shape, values.dtype)

    def sealed(self, result, like):
        return Frozen(result)

    def wrap(self, memory, like):
        return Frozen(np.asarray(memory).view(like.read().dtype))


register(FrozenKind())
'''

METADATA = "Metadata-Version: 2.1\nName: farandole-frozen\nVersion: 1.0\n"


def installed(folder: Path) -> Path:
    """Writes the two packages into a folder for sys.path, and gives it."""
    info = folder / "farandole_frozen-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[farandole.adapters]\nfrozen = farandole_frozen\n")
    (folder / "frozen.py").write_text(FRAMEWORK)
    (folder / "farandole_frozen.py").write_text(ADAPTER)
    return folder


@pytest.fixture(autouse=True)
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the arrays; as in a process where the package was installed from the start."""
    monkeypatch.syspath_prepend(str(installed(tmp_path)))
    monkeypatch.setattr(kinds, "_kinds", list(kinds._kinds))
    monkeypatch.setattr(kinds, "_by_type", {})
    kinds._adapters.cache_clear()
    from frozen import Frozen  # type: ignore[import-not-found]

    yield Frozen
    kinds._adapters.cache_clear()
    for module in ("frozen", "farandole_frozen"):
        sys.modules.pop(module, None)


def mine() -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3) + 10 * fd.rank()


def total() -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3) * fd.size() + 10 * sum(range(fd.size()))


def test_results_are_arrays_of_the_framework(frozen: Any) -> None:
    for turn in range(3):  # a named call that comes again is prepared once
        x = frozen(mine() + turn)
        result = fd.allreduce(x, op=fd.Sum, name="frozen")
        assert type(result) is frozen
        assert (result.read() == total() + turn * fd.size()).all()
        assert (x.read() == mine() + turn).all()


def test_every_way_in_which_results_come(frozen: Any) -> None:
    gathered = fd.allgather(frozen(mine()), name="rows")
    assert type(gathered) is frozen
    assert gathered.read().shape == (2 * fd.size(), 3)
    assert (gathered.read()[::2, 0] == 10 * np.arange(fd.size())).all()
    root = fd.size() - 1
    spread = fd.broadcast(frozen(mine()), root, name="spread")
    assert (spread.read() == np.arange(6.0).reshape(2, 3) + 10 * root).all()
    first, second = fd.grouped_allreduce([frozen(mine()), frozen(mine()[0])], op=fd.Max, name="two")
    assert (first.read() == np.arange(6.0).reshape(2, 3) + 10 * root).all()
    assert (second.read() == np.arange(3.0) + 10 * root).all()
    adasum = fd.allreduce(frozen(np.full(4, 2.0)), op=fd.Adasum, name="adasum")
    assert type(adasum) is frozen
    assert np.allclose(adasum.read(), 2.0)  # that of equal vectors


def test_what_cannot_be_changed_is_refused_on_all_ranks(frozen: Any) -> None:
    with pytest.raises(ValueError, match=r"Frozen array can't be changed in place"):
        fd.allreduce_(frozen(mine()), name="in place")


def test_an_adapter_that_cannot_be_imported_is_named(
    frozen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "farandole_frozen.py").write_text("import a_module_that_is_not_there\n")
    kinds._adapters.cache_clear()
    with pytest.raises(TypeError, match=r"adapter for frozen, farandole_frozen: .*not_there"):
        fd.allreduce(frozen(mine()), name="broken")
