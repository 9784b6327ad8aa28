# SPDX-License-Identifier: Apache-2.0
"""Generates docs/faults.md: runs each program of examples/faults on two ranks, and writes what the
ranks print. `make faults` runs this; tests/jobs/test_faults.py compares the page with new runs."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "examples" / "faults", ROOT / "docs" / "faults.md"
RANKS = 2
SECONDS = 300.0
COLUMNS = 76
NONE = "nothing"
WAITS = "an error after the limit, 30 minutes"
CRASH = "a crash after the limit, 10 minutes"
# Outcomes of the same fault under Gloo and NCCL, according to PyTorch's documentation.
OTHERS = {
    "hang": (f"{WAITS} [1]. `monitored_barrier` names the rank [2].", f"{CRASH} [1]"),
    "slow": (NONE, NONE),
    "stopped": (f"{WAITS} [1]", f"{CRASH} [1]"),
    "uneven": (f"{WAITS} [1]; DDP's `join()` prevents it [4]", f"{CRASH} [1]; `join()` likewise"),
    "order": ("with `TORCH_DISTRIBUTED_DEBUG=DETAIL` an error [3]", f"the same; else {CRASH} [1]"),
    "one_rank": (f"{WAITS} [1]", f"{CRASH} [1]"),
    "mismatch": (
        "an error of DDP's constructor; of other calls with `TORCH_DISTRIBUTED_DEBUG=DETAIL` [3]",
        "the same; other calls likely hang [3]",
    ),
    "exception": ("torchrun ends all workers [5]", "torchrun ends all workers [5]"),
    "dead": ("torchrun ends all workers [5]", "torchrun ends all workers [5]"),
    "diverged": ("DDP starts with rank 0's weights [4].", "the same"),
    "forgot_wrap": (NONE, NONE),
    "forgot_init": (NONE, NONE),
}
HEAD = """\
# A playground of faults

Each program in [`examples/faults`](../examples/faults) makes one common mistake. Start one and read
what it prints:

```
mpirun -np 2 python examples/faults/uneven.py
```

Some of them set `FARANDOLE_STALL_WARN` to 2 seconds (default: 10), so that a report comes sooner.
`make faults` runs all of them and writes this page.

## What you will see

| fault | farandole | Gloo | NCCL |
|---|---|---|---|
"""
SITE = "https://docs.pytorch.org/docs/stable"
FOOT = f"""
The last two columns quote PyTorch's documentation of `torch.distributed`, with its default limits.
"Nothing" means that it documents no message.

1. [The `timeout` of `init_process_group`][1].
2. [`monitored_barrier`][2].
3. [Debugging `torch.distributed` applications][3].
4. [`DistributedDataParallel`][4].
5. [torchrun][5].

[1]: {SITE}/distributed.html#torch.distributed.init_process_group
[2]: {SITE}/distributed.html#torch.distributed.monitored_barrier
[3]: {SITE}/distributed.html#debugging-torch-distributed-applications
[4]: {SITE}/generated/torch.nn.parallel.DistributedDataParallel.html
[5]: {SITE}/elastic/run.html

## The output

This is what the ranks print, without traceback frames and without lines from installed packages.
Long lines are wrapped.

"""


def ran(fault: str) -> list[str]:
    """Runs the program of a fault. Returns the output of each rank, in the form for the page."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        # One file per rank, because mpirun mixes the ranks' lines.
        program = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(FOLDER / fault))}.py"
        rank = f'{program} > "{folder}/${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" 2>&1'
        job = ["mpirun", "-np", str(RANKS), "sh", "-c", rank]
        subprocess.run(job, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        return ["\n".join(_story(Path(folder, str(number)).read_text())) for number in range(RANKS)]


def _story(output: str) -> Iterator[str]:
    trace = box = False
    before = ""
    output = output.replace(f"{ROOT}/", "").replace(f" on {socket.gethostname()}", " on node1")
    for line in output.splitlines():
        report = re.search(r"\[rank \d+ on node1\] farandole .*", line)
        if trace and report:  # a line of another thread, within a traceback
            yield report[0]
            continue
        box ^= line.startswith("----")  # such lines enclose MPI's messages
        trace = line.startswith("Traceback") or (trace and line[:1] in (" ", ""))
        source = line.startswith("  ") and "Warning: " in before
        before = line
        if line.strip("-") and not (box or trace or source or "/site-packages/" in line):
            yield line


def section(fault: str, said: list[str]) -> str:
    """A section of the page: the program's first sentence, and what the ranks have printed."""
    text = f"### {fault}.py\n\n{_sentence(fault)}\n"
    for words in dict.fromkeys(filter(None, said)):
        ranks = [str(rank) for rank in range(RANKS) if said[rank] == words]
        who = "Both ranks print" if len(ranks) == RANKS else f"Rank {ranks[0]} prints"
        lines = "\n".join(_wrapped(line) for line in words.splitlines())
        text += f"\n{who}:\n\n```text\n{lines}\n```\n"
    return text


def _sentence(fault: str) -> str:
    document = ast.get_docstring(ast.parse((FOLDER / f"{fault}.py").read_text())) or ""
    return document.splitlines()[0]


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line,
        COLUMNS,
        subsequent_indent=f"{indent}   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(fault: str, said: list[str]) -> str:
    lines = [line for words in said for line in words.splitlines()]
    first = next(line for line in lines if not line.endswith("wait for others:"))
    first = re.sub(r"^\[.*?\] farandole (warning|error): |^\S+:\d+: |^farandole: ", "", first)
    first = re.sub(r"^farandole\.errors\.", "", first).strip()
    errors = dict.fromkeys(re.findall(r"^farandole\.errors\.(\w+)", "\n".join(lines), re.M))
    then = "".join(f", then `{error}`" for error in errors if not first.startswith(error))
    gloo, nccl = OTHERS[fault]
    words = f"`{textwrap.shorten(first, 150, placeholder=' ...')}`{then}"
    return f"| [{_sentence(fault)}](#{fault}py) | {words} | {gloo} | {nccl} |\n"


def _comparable(text: str) -> set[str]:
    """The lines of a section, without what differs between runs: process ids, times, which of two
    ranks leaves first with the same error, and a warning that a busy machine repeats."""
    text = re.sub(r"\n(?:  )*   (?=\S)", " ", text)  # an odd indent comes from _wrapped
    text = re.sub(r"(?<=Error: )\w+ '[\w ]+': ", "", text)  # names a call, if one is under way
    text = re.sub(r"thread \d+ \(python.*$", "thread", text, flags=re.M)
    text = re.sub(r"0x[0-9a-f]+|\b\d+(\.\d+)? s\b|(?<=pid )\d+|(?<=-CONT )\d+", "N", text)
    either = r"rank \d+ left: (Stall|Mismatch)|(Rank \d prints|Both ranks print):"
    either += "|some ranks still wait for others"
    return {line for line in text.splitlines() if not re.search(either, line)}


def check(fault: str) -> int:
    """Returns 1 if the program prints lines that the page lacks, or lacks an error of the page."""
    now = section(fault, ran(fault))
    found = re.search(rf"^### {fault}\.py\n.*?(?=^### |\Z)", PAGE.read_text(), re.M | re.S)
    page = found[0] if found else ""
    kinds = r"\b(?!Peer)\w+(?:Error|Warning)\b"  # MPI may end a rank before it raises PeerError
    wrong = _comparable(now) - _comparable(page)
    wrong |= set(re.findall(kinds, page)) - set(re.findall(kinds, now))
    print(f"{now}\nnot the same: {sorted(wrong)}" if wrong else "as on the page")
    return int(bool(wrong))


def main() -> int:
    """Writes the page, or compares one fault with the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", choices=OTHERS, metavar="FAULT")
    if fault := parser.parse_args().check:
        return check(fault)
    said = {fault: ran(fault) for fault in OTHERS}
    rows = "".join(_row(*one) for one in said.items())
    sections = "\n".join(section(*one) for one in said.items())
    PAGE.write_text(f"{HEAD}{rows}{FOOT}{sections}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
