# SPDX-License-Identifier: Apache-2.0
"""Looking at jobs from outside, and NaN in a gradient; without MPI (fork launcher)."""

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request

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

NAN = """
import torch, farandole.torch as hvd

hvd.init()
p = torch.nn.Parameter(torch.zeros(3000))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), named_parameters=[("weight", p)])
(p * (float("nan") if hvd.rank() == 1 else 1.0)).sum().backward()
optimizer.step()
print("the parameters hold NaN:", p.isnan().any().item())
"""


def top(*arguments):
    program = "import sys; from farandole.tools.cli import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", program, "top", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"COLUMNS": "150"},
    )
    return result.returncode, result.stdout + result.stderr


def test_top_attaches_to_a_job_without_flags(fork_ranks):
    job = fork_ranks(UP, 2)
    job.wait_for_output("up")
    code, text = top("--once", job.ranks[1].pid)
    assert code == 0, text
    assert "2 of 2 ranks" in text
    rows = [line for line in text.splitlines() if f" {job.ranks[0].pid} " in line]
    assert "of rank 0" in rows[0]
    assert "waits" in rows[0]
    rows = [line for line in text.splitlines() if f" {job.ranks[1].pid} " in line]
    assert "computing" in rows[0]
    assert "loss" in rows[0]


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


def test_top_without_a_job_says_so():
    code, text = top("--once", 1)
    assert code == 1
    assert "no running farandole job" in text


def free_ports(count):
    """The first of some ports in a row that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 65535 - count)


def test_prometheus_is_answered_by_each_rank(fork_ranks):
    port = free_ports(2)
    job = fork_ranks(UP, 2, {"FARANDOLE_METRICS_PORT": str(port)})
    job.wait_for_output("up")
    for rank in (0, 1):
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port + rank}/metrics", timeout=10
        ) as answer:
            text = answer.read().decode()
        assert f'farandole_tensors_done_total{{rank="{rank}"}} 6.0' in text


def test_a_port_in_use_is_an_error_on_all_ranks(fork_ranks):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        results = fork_ranks(UP, 2, {"FARANDOLE_METRICS_PORT": str(port)}).finish()
    for result in results:
        assert result.returncode == 1
        assert "FARANDOLE_METRICS_PORT" in result.out


def test_nan_in_a_gradient_is_named_before_it_spreads(fork_ranks):
    results = fork_ranks(NAN, 3, {"FARANDOLE_CHECK_NUMERICS": "1"}).finish()
    for result in results:
        assert result.returncode != 0
        assert "weight': the input of rank 1 holds NaN" in result.out
        assert "the parameters hold" not in result.out
