# SPDX-License-Identifier: Apache-2.0
"""Looking at jobs from outside, and NaN in a gradient; without MPI (fork launcher)."""

import contextlib
import fcntl
import os
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request
from pathlib import Path

import pytest

import farandole as fd
from farandole._library import lib, text
from harness.process import ended

BUILD = text(lib.farandole_build_id())

UP = """
import sys, threading
import numpy as np
import farandole as fd

fd.init()
for step in range(6):
    fd.allreduce(np.ones(20_000) * fd.rank(), name="loss")
if fd.rank() == 0:
    waiting = fd.allreduce_async(np.ones(3000), name="of rank 0")
    print("up", flush=True)
    waiting.wait()
print("up", flush=True)
threading.Event().wait()
"""

OF_ANOTHER_BUILD = """
import fcntl, os, signal
fd = os.memfd_create("farandole-flight", os.MFD_ALLOW_SEALING)
os.write(fd, b"of another build" * 1000)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
print("up", flush=True)
signal.pause()
"""

NAN = """
import torch, farandole.torch as hvd

hvd.init()
p = torch.nn.Parameter(torch.zeros(3000))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), named_parameters=[("weight", p)])
(p * (float("nan") if hvd.rank() == 1 else 1.0)).sum().backward()
optimizer.step()
print("the parameters hold NaN:", p.isnan().any().item())
"""


def top(*arguments, columns="150"):
    command = [sys.executable, "-m", "farandole", "top", *map(str, arguments)]
    result = ended(command, COLUMNS=columns)
    return result.returncode, result.stdout + result.stderr


def test_top_lives_on_a_terminal(fork_ranks):
    job = fork_ranks(UP, 2)
    job.wait_for_output("up")
    # Tests may run with SIGINT ignored, as a background job of a shell does.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from farandole.tools.cli import main; sys.exit(main())"
    )
    keys, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    command = [sys.executable, "-c", program, "top", "--interval", "0.05", str(job.ranks[0].pid)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with (
        subprocess.Popen(
            command, stdin=screen, stdout=screen, stderr=screen, env=environment
        ) as live,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(live.kill)
        os.close(screen)
        shown = ""
        while shown.count("2 of 2 ranks") < 5:  # pictures
            shown += os.read(keys, 1 << 16).decode(errors="replace")
        live.send_signal(signal.SIGINT)
        while True:
            try:
                shown += os.read(keys, 1 << 16).decode(errors="replace")
            except OSError:  # it has ended
                break
        assert live.wait(60) == 0
    os.close(keys)
    assert "of rank 0" in shown
    assert shown.index("\x1b[?1049h") < shown.index("\x1b[?1049l")  # the other screen, and back


def test_top_fits_80_columns_and_names_the_program(fork_ranks):
    source = UP.replace('"of rank 0"', '"module.encoder.layers.11.attention.weight"')
    job = fork_ranks(source, 2)
    job.wait_for_output("up")
    for arguments, rank in ((["--once"], 1), ([], 0)):  # a pipe gets one picture
        code, text = top(*arguments, job.ranks[rank].pid, columns="80")
        assert code == 0, text
        assert "2 of 2 ranks" in text
        assert ": python program.py" in text
        assert max(map(len, text.splitlines())) <= 80
        row = rf"^ *0 +{job.ranks[0].pid} +waits [\d.]+ s +….*attention\.weight "
        assert re.search(row, text, re.MULTILINE)
        other = next(line for line in text.splitlines() if f" {job.ranks[1].pid} " in line)
        assert "computing" in other
        assert "loss" in other
        assert "\x1b" not in text


def test_top_shows_a_job_beside_one_of_another_build(fork_ranks):
    job = fork_ranks(UP, 2)
    job.wait_for_output("up")
    other = fork_ranks(OF_ANOTHER_BUILD, 1)  # not this process, which may have a world of its own
    other.wait_for_output("up")
    pid = other.ranks[0].pid
    code, text = top("--once", pid, job.ranks[0].pid)
    assert code == 0, text
    assert f"farandole top: process {pid}: this memory holds no flight recorders" in text
    assert "2 of 2 ranks" in text
    code, text = top("--once", pid)
    assert (code, text.count("farandole top: ")) == (1, 1), text


def free_ports(count):
    """The first of some ports in a row that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 65535 - count)


def metrics_at(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_two_jobs_of_a_node_have_metrics(fork_ranks):
    port = str(free_ports(4))
    jobs = []
    for _ in range(2):
        jobs.append(fork_ranks(UP, 2, {"FARANDOLE_METRICS_PORT": port}))
        jobs[-1].wait_for_output("up")
    assert "is taken" not in jobs[0].output()
    for rank, process in enumerate(jobs[1].ranks):
        found = re.search(
            rf"port \d+ is taken: rank {rank} answers on 127.0.0.1:(\d+)", process.output
        )
        assert f'farandole_tensors_done_total{{rank="{rank}"}} 6.0' in metrics_at(found[1])


def threads_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"Threads:\s+(\d+)", status)[1])


STRANGERS = {
    "say nothing": b"",
    "begin": b"GET /metrics HTTP/1.1\r\nHost: ",
    "ask, and read nothing": b"GET /metrics HTTP/1.1\r\n\r\n",
    "never end": b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000,
}


@pytest.mark.parametrize("how", STRANGERS)
def test_strangers_at_the_metrics(fork_ranks, how):
    """500 of them get no thread each, do not keep others from their answer, and have to go."""
    port = free_ports(1)
    job = fork_ranks(UP, 1, {"FARANDOLE_METRICS_PORT": str(port)})
    job.wait_for_output("up")
    pid = job.ranks[0].pid
    before = threads_of(pid)
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(500):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            with contextlib.suppress(OSError):  # it has had to go already
                stranger.sendall(STRANGERS[how])
            strangers.append(stranger)
        assert 'farandole_tensors_done_total{rank="0"}' in metrics_at(port)
        assert threads_of(pid) <= before + 1
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1 << 16):  # until it is closed
                    pass
    assert 'farandole_tensors_done_total{rank="0"}' in metrics_at(port)


def test_a_scraper_is_served_before_silent_callers(fork_ranks):
    """3,000 wait in the kernel when it calls: with 50 ms for each eight it was not served within
    Prometheus' usual 10 s. Who has said nothing in the kernel has had its time."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(few, 4096)), most))
    port = free_ports(1)
    job = fork_ranks(UP, 1, {"FARANDOLE_METRICS_PORT": str(port)})
    job.wait_for_output("up")
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (few, most))
        job.kill(0, signal.SIGSTOP)
        strangers = []
        for _ in range(3000):
            strangers.append(stack.enter_context(socket.socket()))
            strangers[-1].connect(("127.0.0.1", port))
        job.kill(0, signal.SIGCONT)
        assert 'farandole_tensors_done_total{rank="0"}' in metrics_at(port)
        strangers[0].settimeout(60)
        assert strangers[0].recv(1) == b"", "they have reached it: the oldest had to go"


@pytest.mark.parametrize(
    "request_", [b"\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"\xff \xff\r\n\r\n"]
)
def test_what_is_no_scrape(fork_ranks, request_):
    port = free_ports(1)
    job = fork_ranks(UP, 1, {"FARANDOLE_METRICS_PORT": str(port)})
    job.wait_for_output("up")
    with socket.create_connection(("127.0.0.1", port), 60) as stranger:
        stranger.sendall(request_)
        answer = b"".join(iter(lambda: stranger.recv(1 << 16), b""))
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.0 405"))
    assert "tensors_done" in metrics_at(port)


def test_metrics_say_what_they_measure(fork_ranks):
    port = free_ports(2)
    env = {"FARANDOLE_METRICS_PORT": str(port), "FARANDOLE_STALL_WARN": "0.01"}
    job = fork_ranks(UP, 2, env)
    job.wait_for_output("up")
    job.ranks[0].wait_for_output("of rank 0")  # the report of the stall
    text = metrics_at(port)
    assert 'farandole_stalled_calls{rank="0"} 1.0' in text
    assert 'farandole_stalled_calls{rank="1"} 0.0' in metrics_at(port + 1)
    assert f'farandole_build_info{{core="{BUILD}",rank="0",version="{fd.__version__}"}} 1.0' in text
    families = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
    assert len(families) > 15
    for name, meaning in families:
        assert len(meaning.split()) > 3, name
        for unit in ("seconds", "bytes"):
            assert unit not in name or unit.title() in meaning, name


def test_metrics_that_cannot_be_are_no_reason_not_to_train(fork_ranks):
    job = fork_ranks(UP, 2, {"FARANDOLE_METRICS_PORT": "65535"})
    job.wait_for_output("up")
    assert "no metrics of rank 1 on 127.0.0.1:65536: there is no such port" in job.output()


def test_nan_in_a_gradient_is_named_before_it_spreads(fork_ranks):
    results = fork_ranks(NAN, 2, {"FARANDOLE_CHECK_NUMERICS": "1"}).finish()
    for result in results:
        assert result.returncode != 0
        assert "weight': the input of rank 1 holds NaN" in result.out
        assert "the parameters hold" not in result.out
