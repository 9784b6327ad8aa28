# SPDX-License-Identifier: Apache-2.0
"""mkdocs hooks. They generate pages from the package, the command and the README, and check links
to files outside docs/. They read packages whose frameworks are missing from source.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import farandole
import farandole.elastic
import farandole.numpy
import farandole.torch
from farandole.tools import cli
from farandole.torch import elastic as torch_elastic

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "docs" / "source"  # mkdocs.yml names this folder, too
SOURCES.mkdir(parents=True, exist_ok=True)  # mkdocstrings needs the folder
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # become pages, too
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")
# Headings of a reference -> the modules (of farandole or an adapter) whose names they list.
_GROUPS = (
    ("Start and stop", "runtime launch topology"),
    ("Training", "optimizer sync_batch_norm"),
    ("Collectives", "ops collectives mpi_ops objects calls agreement"),
    ("State and parameters", "elastic functions parameters parameter_server sampler"),
    ("Compression", "compression"),
    ("Messages", "messages"),
    ("Process sets", "members process_sets"),
    ("Memory", "arrays memory"),
    ("Observing", "observe config"),
    ("Errors", "errors"),
    ("What is built in", "features"),
)
_VALUES = "Values and second names"


def on_files(files: Any, config: Any) -> Any:
    """mkdocs hook: adds the generated pages."""
    for name in _READ:  # renamed, because griffe has already inspected `farandole`
        folder = SOURCES / f"farandole_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in (ROOT / "adapters" / name).glob("[a-z]*.py"):
            (folder / file.name).symlink_to(file)
        (folder / "__init__.py").touch()
    pages = {
        "index.md": _at_top("README.md"),
        **{name: _at_top(name) for name in TOP[1:]},
        "settings.md": "\n".join(_settings()),
        "commands.md": "\n".join(_commands()),
        **_by_group("api", farandole),
        **_by_group("api-torch", farandole.torch, farandole),
        "api-numpy.md": "\n".join(_reference(farandole.numpy, farandole)) + _CUPY,
        "api-elastic.md": "\n".join(
            x
            for package, same_as in ((farandole.elastic, None), (torch_elastic, farandole.elastic))
            for x in _reference(package, same_as)
        ),
        **{f"api-{x}.md": "\n".join(_read(x)) for x in _READ},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs hook: replaces links to `../file` by a page or path, as the site has no sources."""

    def path(found: re.Match[str]) -> str:
        if not (ROOT / found[2]).exists():
            raise PluginError(f"{page.file.src_uri} links to ../{found[2]}, which is missing")
        if found[2] in TOP:
            name = found[2].replace("README", "index")
            return f"[{found[1]}]({name}{found[3] or ''})"
        text = found[1].strip("`")
        return f"`{found[2]}`" if found[2].endswith(text) else f"{text} (`{found[2]}`)"

    return _OUTSIDE.sub(path, markdown)


def _at_top(name: str) -> str:
    """A page made from a file in the top folder, with its links into docs/ corrected."""
    text = re.sub(r"(\]\(|\]: )docs/", r"\1", (ROOT / name).read_text())
    return text.replace("](README.md", "](index.md")


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield "Environment variables, as `farandole config` lists them. *Job*: rank 0's value holds for"
    yield "all ranks. *Rank*: each rank has its own. Environment variables override what"
    yield "`farandole tune` has found ([tuning](tuning.md)).\n"
    for one in farandole.config():
        yield f"## {one.name}\n"
        meaning = one.meaning.replace("<", "&lt;")
        yield f"{meaning[0].upper()}{meaning[1:]}.\n"
        facts = [f"default `{one.default}`" if one.default else "no default"]
        facts.append("job" if one.job_wide else "rank")
        yield ", ".join([*facts, *([f"Horovod's name `{one.alias}`"] if one.alias else [])]) + "\n"


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    parser = cli.parser()
    (commands,) = (x.choices for x in parser._actions if isinstance(x.choices, dict))
    for name, command in {"": parser, **commands}.items():
        text = command.format_help().replace(str(Path.home()), "~")
        yield f"## farandole {name}\n\n```text\n{text}```\n"


def _by_group(page: str, package: Any, same_as: Any = None) -> dict[str, str]:
    """Pages: one that lists all names, and for each group one with the entries of the names."""
    first = f"# {package.__name__}\n\n{_first_sentence(package.__doc__)}\n"
    pages = {}
    for title, names in _groups(package, same_as).items():
        first += f"\n## {title}\n\n"
        if title == _VALUES:
            first += "".join(f"- `{name}`: {_value(one)}\n" for name, one in names.items())
            continue
        at = f"{page}-{_slug(title)}.md"
        pages[at] = f"# {package.__name__}: {title.lower()}\n\n" + "".join(
            f"::: {_place(one)}\n    options:\n      heading_level: 2\n\n" for one in names.values()
        )
        for name, one in names.items():
            words = " ".join(_first_sentence(inspect.getdoc(one)).split())
            first += f"- [`{name}`]({at}#{_place(one)}): {words}\n"
    return {f"{page}.md": f"{first}\n{_same(package, same_as)}", **pages}


def _reference(package: Any, same_as: Any = None) -> Iterator[str]:
    """One page with all public names, by group."""
    yield f"# {package.__name__}\n\n{_first_sentence(package.__doc__)}\n"
    yield _same(package, same_as)
    for title, names in _groups(package, same_as).items():
        yield f"## {title}\n"
        for name, one in names.items():
            yield f"- `{name}`: {_value(one)}\n" if title == _VALUES else f"::: {_place(one)}\n"


def _groups(package: Any, same_as: Any) -> dict[str, dict[str, Any]]:
    """Heading -> names that only this package has."""
    groups: dict[str, dict[str, Any]] = {title: {} for title, _ in _GROUPS}
    groups[_VALUES] = {}  # values, modules and second names
    for name in sorted(set(package.__all__) - set(_shared(package, same_as))):
        one = getattr(package, name)
        entry = _has_entry(one) and name == one.__name__
        groups[_group(one.__module__) if entry else _VALUES][name] = one
    return {title: names for title, names in groups.items() if names}


def _shared(package: Any, same_as: Any) -> list[str]:
    return [
        name
        for name in sorted(package.__all__)
        if same_as and getattr(same_as, name, None) is getattr(package, name)
    ]


def _same(package: Any, same_as: Any) -> str:
    """A line with links to the names that the package shares with `same_as`."""
    links = []
    for name in _shared(package, same_as):
        one = getattr(package, name)
        links.append(f"[`{name}`]({_address(one)})" if _has_entry(one) else f"`{name}`")
    return f"The same as in `{same_as.__name__}`: {', '.join(links)}.\n" if links else ""


def _address(one: Any) -> str:
    """Link to a name's entry. An elastic name is on the page that has the link."""
    elastic = one.__module__ == farandole.elastic.__name__
    return ("" if elastic else f"api-{_slug(_group(one.__module__))}.md") + f"#{_place(one)}"


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _first_sentence(document: str | None) -> str:
    return re.split(r"(?<=\.)\s", document or "")[0]


def _group(module: str) -> str:
    rooms = set(module.split("."))
    return next((title for title, modules in _GROUPS if rooms & set(modules.split())), "Training")


def _has_entry(one: Any) -> bool:
    return inspect.isfunction(one) or inspect.isclass(one)


def _value(one: Any) -> str:
    if inspect.ismodule(one):
        return f"[elastic training](api-elastic.md), `{one.__name__}`"
    if inspect.isclass(one):
        return f"`{one.__name__}`"
    if isinstance(one, farandole.ReduceOp):
        return f"a [`ReduceOp`]({_address(farandole.ReduceOp)})"
    return f"`{type(one).__name__.strip('_')}`"


def _place(one: Any) -> str:
    """Module and name of the definition. Not affected by a module that has the same name."""
    return f"{one.__module__}.{one.__name__}"


# ---- packages whose frameworks may be missing

_READ = ("jax", "tensorflow", "keras")
_CUPY = """
`farandole.cupy` has the same names for CuPy's arrays ([GPUs](gpu.md#cupy)).
"""


def _read(name: str) -> Iterator[str]:
    """A page of the names that a package adds to those of farandole, or replaces."""
    tree = ast.parse((ROOT / "adapters" / name / "__init__.py").read_text())
    yield f"# farandole.{name}\n\n{_first_sentence(ast.get_docstring(tree))}\n"
    yield f"See [how to use it]({name}.md). All names of [`farandole`](api.md) are here too.\n"
    yield "## Names of this package\n"
    rooms = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            yield from _entry(f"farandole.{name}.{ast.unparse(node.value)}")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            yield f"- `{ast.unparse(node.targets[0])}`: `{node.value.id}`\n"
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("farandole."):
            continue
        room = (node.module or "").split(".")[1]
        if room in ("arrays", "ops"):
            yield from (f"- `{x.name}`: that of [`farandole`](api.md)\n" for x in node.names)
        if room in ("arrays", "ops", "shared"):
            continue
        for one in node.names:
            if (one.asname or "").startswith("_"):
                continue
            if one.name in ("callbacks", "elastic"):
                rooms.append(one.name)
            elif one.asname not in (None, one.name):
                yield f"- `{one.asname}`: `{one.name}`\n"
            elif one.name == "*":
                for public in _public(node.module or ""):
                    yield from _entry(f"{node.module}.{public}")
            elif one.name not in ("calls", "collectives", "__all__", "__version__"):
                yield from _entry(f"{node.module}.{one.name}")
    if name == "keras":  # its __getattr__ provides this name
        yield "- `Compression`: that of the backend's package\n"
    for room in rooms:
        yield f"## farandole.{name}.{room}\n"
        for node in _source(f"farandole.{name}.{room}"):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.match(
                "[A-Z]|run$", node.name
            ):
                yield from _entry(f"farandole.{name}.{room}.{node.name}")


def _public(module: str) -> list[str]:
    for node in _source(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _source(module: str) -> list[ast.stmt]:
    path = ROOT / "adapters" / Path(*module.split(".")[1:])
    return ast.parse(path.with_suffix(".py").read_text()).body


def _entry(place: str) -> Iterator[str]:
    """An entry for a definition. If an adapter defines it, it is read from source."""
    _, package, *_ = place.split(".")
    if not (ROOT / "adapters" / package).is_dir():
        yield f"::: {place}\n"
        return
    alias = place.replace("farandole.", "farandole_", 1)
    yield f"::: {alias}\n    options:\n      force_inspection: false\n"
