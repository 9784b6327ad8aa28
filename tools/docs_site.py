# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the pages that are made from the package and the README, and links to files
outside of docs/, which must be there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import farandole
import farandole.torch

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    pages = {
        "index.md": _at_top("README.md"),
        **{name: _at_top(name) for name in ("CONTRIBUTING.md", "SECURITY.md")},
        "settings.md": "\n".join(_settings()),
        "api.md": "\n".join(_reference(farandole, inherited=())),
        "api-torch.md": "\n".join(_reference(farandole.torch, farandole.__all__)),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to `../file` becomes its path: the site has no sources, and they no address yet."""

    def path(found: re.Match[str]) -> str:
        if not (ROOT / found[2]).exists():
            raise PluginError(f"{page.file.src_uri} links to ../{found[2]}, which is not there")
        text = found[1].strip("`")
        return f"`{found[2]}`" if found[2].endswith(text) else f"{text} (`{found[2]}`)"

    return _OUTSIDE.sub(path, markdown)


def _at_top(name: str) -> str:
    """A page of the top folder, whose links lead into docs/."""
    return re.sub(r"(\]\(|\]: )docs/", r"\1", (ROOT / name).read_text())


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield "Variables of the environment, as `farandole config` lists them. *Job*: rank 0's value"
    yield "holds for all ranks. *Rank*: each rank reads its own. What `farandole tune` has found is"
    yield "weaker than they ([tuning](tuning.md)).\n"
    for one in farandole.config():
        yield f"## {one.name}\n"
        meaning = one.meaning.replace("<", "&lt;")
        yield f"{meaning[0].upper()}{meaning[1:]}.\n"
        facts = [f"default `{one.default}`" if one.default else "no default"]
        facts.append("job" if one.job_wide else "rank")
        yield ", ".join([*facts, *([f"Horovod's name `{one.alias}`"] if one.alias else [])]) + "\n"


def _reference(package: Any, inherited: Any) -> Iterator[str]:
    """The public calls and classes, but those that a package of names `inherited` has too."""
    yield f"# {package.__name__}\n"
    yield f"{(package.__doc__ or '').splitlines()[0]}\n"
    found = {name: getattr(package, name) for name in sorted(package.__all__)}
    found = {n: x for n, x in found.items() if inspect.isfunction(x) or inspect.isclass(x)}
    same = [n for n, x in found.items() if n in inherited and getattr(farandole, n) is x]
    if same:
        links = ", ".join(f"[`{name}`](api.md#{_place(found[name])})" for name in same)
        yield f"The same as in `farandole`: {links}.\n"
    for one in filter(inspect.isfunction, found.values()):  # griffe documents what a call wraps
        one.__signature__ = inspect.signature(one)
        vars(one).pop("__wrapped__", None)
    for kind in (inspect.isfunction, inspect.isclass):
        for name, one in found.items():
            if kind(one) and name not in same and name == one.__name__:
                yield f"::: {_place(one)}\n"


def _place(one: Any) -> str:
    """Where it is defined, which no module of the same name can hide."""
    return f"{one.__module__}.{one.__name__}"
