# SPDX-License-Identifier: Apache-2.0
"""Prints a table of the public names: package, name, page of the site, words of docstrings. Reads
definitions from source, so only torch must be installed. Names that adapters share with farandole
appear once."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
# Package -> page. Packages in IMPORTED can be imported here; those in READ are read from source.
IMPORTED = {
    "farandole": "api",
    "farandole.torch": "api-torch",
    "farandole.numpy": "api-numpy",
    "farandole.elastic": "api-elastic",
    "farandole.torch.elastic": "api-elastic",
    "farandole.c10d": "from-ddp",  # torch calls the only function of this package
}
READ = {
    "farandole.cupy": "api-numpy",
    "farandole.jax": "api-jax",
    "farandole.tensorflow": "api-tensorflow",
    "farandole.keras": "api-keras",
    "farandole.keras.callbacks": "api-keras",
    "farandole.tensorflow.elastic": "api-tensorflow",
    "farandole.keras.elastic": "api-keras",
}
Definition: TypeAlias = ast.FunctionDef | ast.ClassDef


class Name(NamedTuple):
    """A public name. `definition` is None for values, modules and aliases."""

    package: str
    name: str
    page: str
    definition: Definition | None

    def documents(self) -> Iterator[tuple[str, str]]:
        """(name, docstring) of the definition, and of each of its public methods."""
        if self.definition is None:
            return
        yield self.name, ast.get_docstring(self.definition) or ""
        for method in self._methods():
            text = ast.get_docstring(method)
            inherits = isinstance(self.definition, ast.ClassDef) and self.definition.bases
            if not method.name.startswith("_") and (text is not None or not inherits):
                yield f"{self.name}.{method.name}", text or ""

    def _methods(self) -> Iterator[ast.FunctionDef]:
        if isinstance(self.definition, ast.ClassDef):
            yield from (node for node in self.definition.body if isinstance(node, ast.FunctionDef))


def names() -> list[Name]:
    """All public names."""
    found: dict[str, Name] = {}
    farandole = importlib.import_module("farandole")
    own = set(farandole.__all__)
    for package, page in IMPORTED.items():
        module = importlib.import_module(package)
        for name in module.__all__:
            one, neutral = getattr(module, name), getattr(farandole, name, None)
            if one is neutral and module is not farandole:
                continue
            place = getattr(one, "__module__", None) or package
            actual = getattr(one, "__name__", name)
            node = _definition(place, actual) if place.startswith("farandole") else None
            key = f"{place}.{actual}" if node else f"{package}.{name}"
            found.setdefault(key, Name(package, name, page, node))
    for package, page in READ.items():
        for name in _listed(package):
            place = _place(package, name)
            if name not in own or (place and "." in place.removeprefix("farandole.")):
                node = _definition(place or package, name)
                found.setdefault(f"{place or package}.{name}", Name(package, name, page, node))
    return list(found.values())


@cache
def _tree(module: str) -> list[ast.stmt]:
    path = Path(*module.split(".")[1:])
    for folder in ("pyruntime", "adapters", "."):
        for file in (path.with_suffix(".py") if path.name else path, path / "__init__.py"):
            if (ROOT / folder / file).is_file():
                return ast.parse((ROOT / folder / file).read_text()).body
    return []


def _listed(module: str) -> list[str]:
    """The names in a module's __all__, or else its definitions without leading underscore."""
    for node in _tree(module):
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "__all__":
            continue
        if isinstance(node.value, ast.List | ast.Tuple):
            texts = (x.value for x in node.value.elts if isinstance(x, ast.Constant))
            listed = [x for x in texts if isinstance(x, str)]
            return [*listed, *(x for star in _stars(module) for x in _listed(star))]
    return [
        node.name
        for node in _tree(module)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.match("[A-Z]|run$", node.name)
    ]


def _stars(module: str) -> list[str]:
    """The submodules from which the module imports `*`."""
    return [
        node.module or ""
        for node in _tree(module)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        if (node.module or "").startswith(module)
    ]


def _place(module: str, name: str) -> str | None:
    """The module from which `module` imports `name`."""
    for node in reversed(_tree(module)):
        if isinstance(node, ast.ImportFrom) and name in [x.asname or x.name for x in node.names]:
            return node.module
    return next((star for star in _stars(module) if name in _listed(star)), None)


def _definition(module: str, name: str) -> Definition | None:
    """Follows imports until the definition of a name."""
    found: Definition | None = None
    for node in _tree(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            found = node
    place = None if found else _place(module, name)
    return _definition(place, name) if place and place != module else found


def main() -> None:
    """Prints the table."""
    print("| name | page | docstring |\n|---|---|---|")
    for one in names():
        words = sum(len(text.split()) for _, text in one.documents())
        print(f"| {one.package}.{one.name} | {one.page} | {words or ''} |")


if __name__ == "__main__":
    main()
