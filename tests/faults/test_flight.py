# SPDX-License-Identifier: Apache-2.0
"""Flight recorders: dumped by survivors and from outside, explained, read by PyTorch's analyser.

Under the fork launcher (no MPI): survivors live on to write.
"""

import json
import re

import pytest

from farandole.observe import flight
from farandole.observe.flight import calls_of
from farandole.tools import cli
from harness.commands import farandole

ALLREDUCE = r"\(allreduce at program.py:\d+\)"  # its call has this line

HEAD = """
import os, signal, sys, threading
import numpy as np
import farandole as fd

fd.init()
rank = fd.rank()
for step in range(4):
    for k in range(3):
        fd.allreduce(np.full(2000, rank + k, np.float32), name=f"grad.{k}")
"""
WORK = """
try:
    fd.allreduce(np.ones((30, 40)) * rank, name=name)
except fd.FarandoleError as error:
    print(type(error).__name__, flush=True)
"""


def explained(folder, capsys):
    assert cli.main(["explain", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("dead", [0, 1])
def test_survivors_dump_the_killed_rank(fork_ranks, tmp_path, capsys, dead):
    source = HEAD + f"name = 'last words' if rank == {dead} else 'of the others'\n"
    source += f"if rank == {dead}:\n    fd.barrier()\n"  # the others have come to it, at least
    source += "    fd.allreduce_async(np.ones(7), name=name)\n"
    source += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    source += WORK.replace("try:", "try:\n    fd.barrier()")
    folder = tmp_path / "dumps" / "here"
    job = fork_ranks(source, 3, {"FARANDOLE_FLIGHT_DIR": str(folder)})
    results = job.finish()
    assert all("PeerError" in r.out for i, r in enumerate(results) if i != dead)
    pages = flight.read_dumps(folder)
    assert [page["rank"] for page in pages] == [0, 1, 2]
    assert pages[dead]["state"] == "died"
    last = calls_of(pages[dead])[-1]
    assert (last.name, last.shape, last.state) == ("last words", (7,), "submitted")
    for page in pages:
        grads = [call for call in calls_of(page) if str(call.name).startswith("grad.")]
        done = [call for call in grads if call.state == "done"]
        assert [call.name for call in done] == [f"grad.{k}" for k in range(3)] * 4
        assert all(call.bytes == 8000 and call.dtype == "float32" for call in done)
        assert all(c.submitted < c.negotiated < c.done for c in done)
        assert all(c.negotiated < c.launched < c.done for c in done if c.bucket)
    text = explained(folder, capsys)
    assert f"First: rank {dead} died; its last call was 'last words'" in text
    assert not list(folder.glob("*.tmp"))


def test_a_stall_is_dumped_and_explained(fork_ranks, tmp_path, capsys):
    source = HEAD + "name = 'layer.weigth' if rank == 1 else 'layer.weight'\n" + WORK
    source += "fd.barrier()\n"  # who left at once would be the cause of what others read
    folder = tmp_path / "dumps"
    env = {
        "FARANDOLE_FLIGHT_DIR": str(folder),
        "FARANDOLE_STALL_WARN": "0.3",
        "FARANDOLE_STALL_ABORT": "1.5",
    }
    results = fork_ranks(source, 3, env).finish()
    assert all("StallError" in result.out for result in results)
    text = explained(folder, capsys)
    first = next(line for line in text.splitlines() if line.startswith("First: "))
    assert re.search(rf"ranks 0, 2 waited \d\.\d+ s for 'layer.weight' {ALLREDUCE}", first)
    assert "rank 1 never submitted it" in first
    assert "it waits for 'layer.weigth': is it the same tensor?" in first
    assert re.search(r"ranks 0.*2 failed with StallError: no progress", text)


def test_messages_that_never_meet_are_explained(fork_ranks, tmp_path, capsys):
    """Of a pair that hangs, since the tags differ, and of a rank that waits for anybody."""
    source = HEAD + (
        "if rank == 0: waiting = fd.send_async(np.ones(3), 1, tag=7, name='activations')\n"
        "if rank == 1: waiting = fd.recv_async(np.ones(3), 0, tag=8)\n"
        "if rank == 2: waiting = fd.recv_async(np.ones(3))\n"
        "print('up', flush=True)\n"
        "waiting.wait()\n"
    )
    job = fork_ranks(source, 3)
    job.wait_for_output("up")
    code, text = farandole("dump", job.ranks[1].pid, "--into", tmp_path)
    assert code == 0, text
    pages = flight.read_dumps(tmp_path)
    ends = [calls_of(page)[-1] for page in pages]
    assert [(end.op, end.peer, end.tag, end.state) for end in ends] == [
        ("send", 1, 7, "submitted"),
        ("receive", 0, 8, "submitted"),
        ("receive", -1, 0, "submitted"),
    ]
    text = explained(tmp_path, capsys)
    assert re.search(
        r"rank 0 waits \S+ s for send 'activations' to rank 1 with tag 7; rank 1 never posted "
        r"the other end; of rank 1: its last call was receive from rank 0 with tag 8 "
        r"\(submitted\)\.",
        text,
    )
    assert "for receive from rank 0 with tag 8; rank 0 never posted the other end" in text
    assert "for receive from any rank with tag 0; ranks 0, 1 never posted the other end" in text


def test_a_running_job_is_dumped_from_outside(fork_ranks, tmp_path, capsys):
    tail = """
if rank == 0:
    waiting = fd.allreduce_async(np.ones(5, np.int64), name="evaluation")
print("up", flush=True)
sys.stdin.read() if rank else None
threading.Event().wait()
"""
    job = fork_ranks(HEAD + tail, 2)
    job.wait_for_output("up")
    folder = tmp_path / "dumps"
    pid = job.ranks[1].pid
    code, out = farandole("dump", pid, "--into", folder)
    assert code == 0, out
    assert out.splitlines() == [f"{folder}/flight-rank-{rank}.json  running" for rank in (0, 1)]
    text = explained(folder, capsys)
    assert re.search(rf"First: rank 0 waits \S+ s for 'evaluation' {ALLREDUCE}", text)
    assert "rank 1 never submitted it; of rank 1: its last call was 'grad.2'" in text


def test_ranks_that_disagree_are_told(fork_ranks, tmp_path, capsys):
    source = HEAD + WORK.replace("(30, 40)", "(30, 40 + rank)").replace("name=name", "name='b'")
    folder = tmp_path / "dumps"
    for ranks in (3, 2):  # the last rank's dump stays behind: it is of an earlier job
        results = fork_ranks(source, ranks, {"FARANDOLE_FLIGHT_DIR": str(folder)}).finish()
        assert all("MismatchError" in result.out for result in results)
    assert (folder / "flight-rank-2.json").exists()
    assert cli.main(["explain", str(folder)]) == 0
    text, left_out = capsys.readouterr()
    assert "2 of 2 ranks recorded" in text
    assert left_out.startswith("skipped 1 in")
    assert re.search(rf"First: the ranks disagree about 'b' {ALLREDUCE}: shape is", text)
    assert "(30, 40) on rank 0, (30, 41) on rank 1" in text


def test_nothing_is_written_unless_asked(fork_ranks, tmp_path):
    fork_ranks(HEAD + "name = str(rank)\nsys.exit(3) if rank else None\n" + WORK, 2).finish()
    assert not list(tmp_path.glob("flight*"))


def test_a_folder_that_cannot_be_made_is_named(fork_ranks, tmp_path):
    folder = tmp_path / "file"
    folder.touch()
    source = HEAD + "name = str(rank)\nsys.exit(3) if rank else None\n" + WORK
    job = fork_ranks(source, 2, {"FARANDOLE_FLIGHT_DIR": str(folder)})
    job.finish()
    assert f"no flight recorder dump: cannot make the folder {folder}" in job.output()


def test_a_long_run_keeps_the_last_events(fork_ranks, tmp_path):
    source = (
        HEAD
        + """
for n in range(1500):
    fd.allreduce(np.ones(3) * rank, name="loss")
from farandole.observe.flight import own_page
import json
print(json.dumps(own_page(5000)))
"""
    )
    for rank, result in enumerate(fork_ranks(source, 2).finish()):
        page = json.loads(result.check().out)
        assert page["rank"] == rank
        # Some of the calls that go through the coordinator have buckets, which have events, too.
        assert 3 * 1500 < page["recorded"] <= 3 * 1500 + 5 * 12
        assert len(page["events"]) == 4096
        assert page["dropped"] == 0
        assert {call.name for call in calls_of(page)} == {"loss"}
        assert page["counters"]["tensors_done"] == 1512
        assert sum(page["histograms"]["negotiation_ns"]["slots"]) == 1512


LONG = """
import os, sys, threading
import numpy as np
import farandole as fd

fd.init()
rank = fd.rank()
for n in range(2000):
    fd.allreduce(np.full(3 + n % 7, rank), name=f"grad.{n % 7}")
"""
HUNG = """
if rank == 0:
    waiting = [fd.allreduce_async(np.ones(5), name="layer.weight")]
    # A set of this rank alone goes on, until the ring has lost what waits, too.
for n in range(2000):
    fd.allreduce(np.ones(3), name="mine", process_set=alone[rank])
print("up", flush=True)
threading.Event().wait()
"""


def dumped(job, folder, capsys):
    job.wait_for_output("up")
    code, text = farandole("dump", job.ranks[0].pid, "--into", folder)
    assert code == 0, text
    return explained(folder, capsys)


@pytest.mark.parametrize("named", [True, False])
def test_what_hangs_is_known_though_the_ring_wrapped(fork_ranks, tmp_path, capsys, named):
    source = LONG + "alone = [fd.add_process_set([0]), fd.add_process_set([1])]\n" + HUNG
    if not named:
        source = source.replace(', name="layer.weight"', "").replace('name="mine", ', "")
    job = fork_ranks(source, 2)
    text = dumped(job, tmp_path / "dumps", capsys)
    what = "'layer.weight'" if named else r"unnamed call \d+"
    assert re.search(rf"First: rank 0 waits \S+ s for {what} {ALLREDUCE}; rank 1 never", text)
    assert "same tensor" not in text
    assert "Also" not in text


def test_a_healthy_job_is_not_accused_though_the_ring_wrapped(fork_ranks, tmp_path, capsys):
    # Rank 1 records other events as well, so the rings do not begin with the same call.
    source = LONG.replace("range(2000)", "range(1000)") + "alone = fd.add_process_set([1])\n"
    source += "for n in range(500):\n    rank and fd.allreduce(np.ones(2), process_set=alone)\n"
    source += LONG[LONG.index("for n in") :]
    source += 'print("up", flush=True)\nthreading.Event().wait()\n'
    text = dumped(fork_ranks(source, 2), tmp_path / "dumps", capsys)
    assert re.search(r"Nothing went wrong: all ranks have finished the last \d+ calls\.", text)
