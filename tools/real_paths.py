# SPDX-License-Identifier: Apache-2.0
"""Gives modules of an editable install their real paths, also in tracebacks. build/mypy contains
links, which type checkers and editors follow. The .pth file of the install imports this module
under the name _farandole_real_paths."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from os.path import realpath
from types import ModuleType


class RealPaths:
    """Finds farandole's modules. The folder of the package remains the folder of links."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, with real paths; None for modules of other packages."""
        if name.partition(".")[0] != "farandole":
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or found.origin is None:
            return found
        places = found.submodule_search_locations
        if places is not None and "." in name:
            places = [realpath(place) for place in places]
        return spec_from_file_location(
            name, realpath(found.origin), submodule_search_locations=places
        )


sys.meta_path.insert(0, RealPaths)
