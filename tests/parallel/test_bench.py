# SPDX-License-Identifier: Apache-2.0
"""`farandole bench` on this very job: it measures, and nothing is wrong."""

import json

import pytest
import torch  # noqa: F401 (of gloo; first, so that gc.collect() between timings does not see it)

import farandole
from farandole.tools import cli

pytestmark = pytest.mark.world("gloo")  # whose threads live on in the process


@pytest.mark.ranks(1, 2, 3)
def test_every_collective_is_right(tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["bench", "-b", "4", "-e", "3K", "-f", "768", "--calls", "3", "--json", str(path)]
    arguments += ["--collectives", "allreduce,broadcast,allgather,reducescatter,alltoall"]
    assert cli.main([*arguments, "--dtypes", "float32,float16"]) == 0
    farandole.init()  # the command has left
    shown = capsys.readouterr().out
    if farandole.rank() != 0:
        assert shown == ""
        assert not path.exists()
        return
    assert shown.splitlines()[-1] == "# wrong: 0"
    report = json.loads(path.read_text())
    assert report["settings"]["ranks"].startswith(f"{farandole.size()} on ")
    rows = report["results"]
    assert len(rows) == 5 * 2 * 2
    assert all(row["wrong"] == 0 and row["calls"] >= 3 for row in rows)
    assert all(0 < row["min"] <= row["median"] <= row["p99"] for row in rows)


@pytest.mark.ranks(2)
def test_peers_take_part(tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["bench", "-b", "2K", "-e", "256K", "-f", "128", "--calls", "2"]
    arguments += ["--peers", "zerocopy,gloo,mpi"]
    assert cli.main([*arguments, "--dtypes", "float32,float16", "--json", str(path)]) == 0
    farandole.init()
    if farandole.rank() == 0:
        rows = json.loads(path.read_text())["results"]
        peers = {dtype: [r["peer"] for r in rows if r["dtype"] == dtype] for dtype in report_dtypes}
        small = ["farandole", "zerocopy", "gloo"]
        assert peers["float32"] == [*small, "mpi"] * 2
        assert peers["float16"] == small * 2  # MPI knows no 16-bit floats
        assert sum(r["wrong"] for r in rows) == 0


report_dtypes = ["float32", "float16"]


@pytest.mark.ranks(2)
def test_a_wrong_result_fails_the_command(monkeypatch):
    """A peer that spoils one element of one rank: counted, and the exit code says so."""
    from farandole.tools.bench_peers import FarandolePeer

    prepare = FarandolePeer.prepare

    def spoiling(self, operand):
        run = prepare(self, operand)

        def call():
            output = run()
            if farandole.rank() == 1:
                output[len(output) // 2] += 1
            return output

        return call

    monkeypatch.setattr(FarandolePeer, "prepare", spoiling)
    arguments = ["bench", "-b", "1K", "-e", "1K", "--calls", "2", "--collectives", "allgather"]
    assert cli.main(arguments) == 1
    farandole.init()
