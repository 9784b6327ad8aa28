# SPDX-License-Identifier: Apache-2.0
"""`farandole tune` on this very job: what it writes is what init() reads."""

import os

import numpy as np
import pytest

import farandole
from farandole.tools import cli, tune, tune_search
from farandole.tools.tune_search import SearchResult

BEST = (("FARANDOLE_BLOCK_BYTES", "96K"), ("FARANDOLE_FUSION_THRESHOLD", "8M"))


def value_of(name):
    return next((v.value, v.source) for v in farandole.config() if v.name == name)


@pytest.mark.ranks(2, 3)
def test_it_tries_settings_and_leaves_the_environment_alone(tmp_path, capsys, monkeypatch):
    for name, value in (("_GRADIENTS", 4), ("_LARGE", 1 << 20)):
        monkeypatch.setattr(tune_search, name, value)
    few = {name: values[:2] for name, values in tune_search.KNOBS.items()}
    monkeypatch.setattr(tune_search, "KNOBS", few)
    path = tmp_path / "new" / "tuning.conf"
    before = dict(os.environ)
    assert cli.main(["tune", "--turns", "1", "--output", str(path)]) == 0
    assert dict(os.environ) == before
    assert not farandole.is_initialized()
    farandole.init()
    shown = capsys.readouterr().out
    if farandole.rank() != 0:
        assert shown == ""
        assert not path.exists()
        return
    for name, values in few.items():
        for value in values:
            assert f"{name}={value}" in shown
    assert f"{farandole.size()} ranks" in path.read_text()


@pytest.mark.ranks(2)
def test_one_wrong_result_is_told(monkeypatch):
    """Only calls of one tensor go wrong; those of many are right."""
    for name, value in (("_GRADIENTS", 4), ("_LARGE", 1 << 20)):
        monkeypatch.setattr(tune_search, name, value)
    farandole.shutdown()
    with monkeypatch.context() as broken:
        broken.setattr(farandole, "allreduce_", lambda x, **_: x)
        with pytest.raises(farandole.FarandoleError, match="wrong results with"):
            tune_search._measure(BEST)
    farandole.init()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wanted", ["1M", "2M", ""])
def test_the_block_size_that_is_fastest_is_found(monkeypatch, wanted):
    """Among times that differ from turn to turn; where no value is faster, nothing gains."""
    turns = []

    def measure(settings):
        turns.append(settings)
        noise = 1 + (len(turns) * 7 % 5) / 100
        return np.full(3, noise * (0.7 if ("FARANDOLE_BLOCK_BYTES", wanted) in settings else 1.0))

    monkeypatch.setattr(tune_search, "_measure", measure)
    found = tune_search.search(5, lambda line: None)
    sizes = [value for name, value in found.settings if name == "FARANDOLE_BLOCK_BYTES"]
    assert not wanted or sizes == [wanted]
    assert (found.gain > 0.25) == bool(wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("gain", "expected"), [(0.2, "tuning file"), (0.01, "default")])
def test_only_what_gains_enough_is_kept(gain, expected, monkeypatch, tmp_path):
    path = tmp_path / "tuning.conf"
    monkeypatch.setattr(tune, "search", lambda turns, out: SearchResult(BEST, gain))
    assert cli.main(["tune", "--output", str(path)]) == 0
    monkeypatch.setenv("FARANDOLE_TUNING", str(path) if path.exists() else "none")  # rank 0's holds
    farandole.init()
    if farandole.rank() == 0:
        value, source = value_of("FARANDOLE_BLOCK_BYTES")
        assert source == expected
        assert (value == str(96 << 10)) == (expected == "tuning file")
    farandole.shutdown()
    monkeypatch.delenv("FARANDOLE_TUNING")
    farandole.init()


@pytest.mark.ranks(2, 3)
def test_a_measurement_is_of_the_settings_that_it_names():
    """Blocks of a kilobyte cannot be as fast as the default's; all ranks see the same times."""
    farandole.shutdown()
    tiny = tune_search._measure([("FARANDOLE_BLOCK_BYTES", "1K")])
    usual = tune_search._measure([])
    farandole.init()
    assert tiny[0] > usual[0]
    assert len({tuple(x) for x in farandole.allgather_object(usual.tolist())}) == 1


@pytest.mark.ranks(1)
def test_one_rank_is_told_the_remedy(capsys):
    assert cli.main(["tune"]) == 2
    assert "mpirun -np 4 --bind-to none farandole tune" in capsys.readouterr().err
    farandole.init()
