# SPDX-License-Identifier: Apache-2.0
"""`farandole tune` on this very job: what it writes is what init() reads."""

import os

import numpy as np
import pytest

import farandole
from farandole.tools import cli, tune, tune_search
from farandole.tools.tune_search import Found

BEST = (("FARANDOLE_BLOCK_BYTES", "96K"), ("FARANDOLE_FUSION_THRESHOLD", "8M"))


def value_of(name):
    return next((v.value, v.source) for v in farandole.config() if v.name == name)


@pytest.mark.ranks(2, 3)
def test_it_tries_settings_and_leaves_the_environment_alone(tmp_path, capsys, monkeypatch):
    for name, value in (("_FEWEST", 1), ("_MOST", 1), ("_GRADIENTS", 4), ("_LARGE", 1 << 20)):
        monkeypatch.setattr(tune_search, name, value)
    few = {name: values[:2] for name, values in tune_search.KNOBS.items()}
    monkeypatch.setattr(tune_search, "KNOBS", few)
    path = tmp_path / "new" / "tuning.conf"
    before = dict(os.environ)
    assert cli.main(["tune", "--seconds", "600", "--output", str(path)]) == 0
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
            tune_search._measure(BEST, tune_search._Clock())
    farandole.init()


@pytest.mark.ranks(2)
def test_seconds_are_held(monkeypatch, capsys, tmp_path):
    """A measurement takes 2 s of a clock that only measurements move."""
    measured = []

    def measure(settings, clock):
        measured.append(settings)
        clock.now += 2.0
        return np.full(3, 1.0 - 0.1 * bool(settings))

    monkeypatch.setattr(tune_search, "_measure", measure)
    path = tmp_path / "tuning.conf"
    for seconds in (200, 20, 1):
        measured.clear()
        code = cli.main(["tune", "--seconds", str(seconds), "--output", str(path)])
        assert 2 <= len(measured) <= seconds // 2 + 2  # one candidate beside the defaults
        assert code == (seconds < 200)
        assert path.exists() == (seconds == 200 and measured_by_rank_0())
        path.unlink(missing_ok=True)
        said = capsys.readouterr().out
        if measured_by_rank_0():
            assert ("take more --seconds" in said) == (seconds < 200)
    farandole.init()


def measured_by_rank_0():
    return os.environ["OMPI_COMM_WORLD_RANK"] == "0"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("gain", "expected"), [(0.2, "tuning file"), (0.01, "default")])
def test_only_what_gains_enough_is_kept(gain, expected, monkeypatch, tmp_path):
    path = tmp_path / "tuning.conf"
    monkeypatch.setattr(tune, "search", lambda seconds, out: Found(BEST, gain))
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
    tiny = tune_search._measure([("FARANDOLE_BLOCK_BYTES", "1K")], tune_search._Clock())
    usual = tune_search._measure([], tune_search._Clock())
    farandole.init()
    assert tiny[0] > usual[0]
    assert len({tuple(x) for x in farandole.allgather_object(usual.tolist())}) == 1


@pytest.mark.ranks(1)
def test_one_rank_is_told_the_remedy(capsys):
    assert cli.main(["tune"]) == 2
    assert "mpirun -np 4 --bind-to none farandole tune" in capsys.readouterr().err
    farandole.init()
