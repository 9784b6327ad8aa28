# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/hangs.md show what the program prints today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from harness.mpirun import MPI_ENVIRONMENT
from harness.process import ended

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hangs.md"


def words(picture: Path) -> str:
    """The picture's words, without what differs from run to run: numbers and their width, machine,
    where the kernel has put a thread that sleeps."""
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    text = " ".join(" ".join(x.text or "" for x in texts).replace("\xa0", " ").split())
    text = re.sub(r"\(python\) .*? Main thread", "(python) Main thread", text)
    text = re.sub("─+", "─", text)  # as long as the widest number
    return re.sub(r"[\d.]*\d", "#", text)


def test_pictures_show_what_is_printed(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert "sleep" in program.splitlines()[9], "the page says line 10"
    shown = re.findall(r"^!\[[^\]]+\]\((\S+\.svg)\)$", PAGE.read_text(), re.MULTILINE)
    command = [sys.executable, "tools/captures.py", "--into", tmp_path]
    done = ended(command, cwd=ROOT, **MPI_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert sorted(shown) == sorted(made.name for made in tmp_path.iterdir())
    for name in shown:
        assert words(PAGE.parent / name) == words(tmp_path / name), "run `make captures`"
        assert "hang.py" in words(tmp_path / name)
        assert "url(" not in re.sub(r"url\(#", "", (tmp_path / name).read_text())
