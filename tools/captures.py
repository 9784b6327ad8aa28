# SPDX-License-Identifier: Apache-2.0
"""Generates the pictures of docs/hangs.md: runs the page's program on two ranks, and captures the
stall report and the output of `farandole explain`. `make captures` runs this script."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "hangs.md"
BIN = Path(sys.executable).parent
COLUMNS = 100
SECONDS = 100.0  # within which the report must appear
HOST, HOME = "node1", "/home/you"  # shown in place of this machine's name and folder


def program() -> str:
    """The program on the page, which hangs."""
    (found,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def captures(folder: Path) -> dict[str, str]:
    """Runs the program in `folder`. Returns picture name -> output of the command."""
    (folder / "hang.py").write_text(program())
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "FARANDOLE_STALL_WARN": "3"}
    started = ["mpirun", "-np", "2", "python", "hang.py"]
    job = subprocess.Popen(
        started,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(SECONDS, os.killpg, (job.pid, signal.SIGKILL))
    limit.start()

    def shown(*command: str) -> str:
        done = subprocess.run(
            ["farandole", *command],
            cwd=folder,
            env={**env, "FORCE_COLOR": "1"},
            check=True,
            capture_output=True,
            text=True,
        )
        return f"$ {' '.join(['farandole', *command])}\n{done.stdout}"

    try:
        report = _report(job)
        limit.cancel()
        found = re.search(r"thread (\d+) \(python\)", report)
        if not found:
            raise SystemExit(f"the report names no thread of rank 1:\n{report}")
        pid = found[1]
        return {
            "hang-report": f"$ FARANDOLE_STALL_WARN=3 {' '.join(started)}\n{report}",
            "hang-explain": shown("dump", pid) + shown("explain", "flight"),
        }
    finally:
        limit.cancel()
        job.terminate()  # mpirun ends the ranks
        job.communicate()


def _report(job: subprocess.Popen[str]) -> str:
    assert job.stdout
    lines = []
    for line in job.stdout:
        lines.append(line)
        if re.search(r'hang\.py", line \d+', line):
            return "".join(lines)
    raise SystemExit(f"the job ended without a report:\n{''.join(lines)}")


def picture(name: str, text: str) -> str:
    """An SVG of a terminal with this text. Has no web fonts, so pages show it offline."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="truecolor")
        console.print(Text.from_ansi(text))
        svg = console.export_svg(title="", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines())


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=PAGE.parent, metavar="FOLDER")
    into = parser.parse_args().into
    with tempfile.TemporaryDirectory(prefix="captures-") as folder:
        found = captures(Path(folder))
        for name, text in found.items():
            seen = text.replace(folder, HOME).replace(f" on {socket.gethostname()}", f" on {HOST}")
            (into / f"{name}.svg").write_text(picture(name, seen))


if __name__ == "__main__":
    main()
