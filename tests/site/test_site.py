# SPDX-License-Identifier: Apache-2.0
"""The site that `make docs` builds: it fails on a broken link, and has every public name."""

from __future__ import annotations

import ast
import html
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE, PYTHON = ROOT / "build" / "site", ROOT / "build" / "docs" / "bin" / "python"
# The package's file -> the page of its names.
PACKAGES = {
    "pyruntime/__init__.py": "api",
    "pyruntime/shared.py": "api",
    "pyruntime/elastic.py": "api-elastic",
    "adapters/torch/__init__.py": "api-torch",
    "adapters/torch/mpi_ops.py": "api-torch",
    "adapters/torch/elastic.py": "api-elastic",
    **{f"adapters/{x}/__init__.py": f"api-{x}" for x in ("jax", "keras", "numpy", "tensorflow")},
    "adapters/cupy/__init__.py": "api-numpy",
}
pytestmark = pytest.mark.skipif(
    not PYTHON.exists() or not SITE.exists(), reason="needs `make docs`, which builds the site"
)


@pytest.mark.parametrize(("link", "code"), [("#a-page", 0), ("absent.md", 1), ("#absent", 1)])
def test_make_docs_fails_on_a_broken_link_or_anchor(tmp_path: Path, link: str, code: int) -> None:
    """By the command and the settings of `make docs`."""
    found = re.search(r"bin/python (-m mkdocs .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["validation"]
    (tmp_path / "mkdocs.yml").write_text(yaml.dump({"site_name": "x", "validation": settings}))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[here]({link})\n")
    done = subprocess.run([PYTHON, *found[1].split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "page"), PACKAGES.items())
def test_every_public_name_is_on_a_page(file: str, page: str) -> None:
    (names,) = (
        [x.value for x in node.value.elts if isinstance(x, ast.Constant)]
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if isinstance(node.value, ast.List)
    )
    text = (SITE / f"{page}.html").read_text()
    assert not [n for n in names if not re.search(rf"[>.\"]{re.escape(n)}[<\"]", text)]


def test_torchs_page_opens_with_the_optimizer() -> None:
    """It lists all names; their entries are on a page per group."""
    text = (SITE / "api-torch.html").read_text()
    article = text[text.index("<article") :]
    links = re.findall(r'<a href="([^"#]+)#[^"]+"><code>(\w+)</code>', article)
    assert links[0] == ("api-torch-training.html", "DistributedOptimizer")
    assert len({page for page, _ in links}) >= 5
    for page in {page for page, _ in links}:
        assert len((SITE / page).read_text()) < 500_000, page


MOST_COLUMNS = 80  # of code of 13.6 pixels in a column of 688


@pytest.mark.parametrize("page", sorted(SITE.glob("api*.html")), ids=lambda page: page.stem)
def test_signatures_fit_the_page(page: Path) -> None:
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"<[^>]+>", "", block).splitlines()]
    # One example may have a line of the source's width.
    assert not [line for line in map(html.unescape, lines) if len(line) > MOST_COLUMNS + 8]
