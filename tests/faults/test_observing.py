# SPDX-License-Identifier: Apache-2.0
"""Looking at jobs from outside, and NaN in a gradient; without MPI (fork launcher)."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

from harness.process import ended

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


def test_nan_in_a_gradient_is_named_before_it_spreads(fork_ranks):
    results = fork_ranks(NAN, 2, {"FARANDOLE_CHECK_NUMERICS": "1"}).finish()
    for result in results:
        assert result.returncode != 0
        assert "weight': the input of rank 1 holds NaN" in result.out
        assert "the parameters hold" not in result.out
