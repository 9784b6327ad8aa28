# SPDX-License-Identifier: Apache-2.0
"""Finds call sites, which are the source lines of the user's program from which calls are made. The
core records and compares them. Every call looks up its site on the caller's thread. A known site
costs only a few table look-ups.

A site is the innermost stack frame that does not belong to farandole, torch or another library. The
site's text is file:line. The text keeps only as many folders of the file's path as the module's
name has dots. It is therefore equal on all hosts, wherever the program is stored.
"""

from __future__ import annotations

import os
from pathlib import Path
from sys import _getframe
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from farandole._library import ffi
from farandole.config import setting
from farandole.installed import own_folders

_MOST = 10_000  # limit for remembered code objects
# Code in torch.distributed from which ranks may make the same call on different lines: a function
# with its file, and an entire file.
_UNLIKE = ("gather_object", "torch/distributed/distributed_c10d.py")
_UNLIKE_FILE = "torch/distributed/algorithms/join.py"
_USERS = ("<stdin>", "<string>")  # programs without a file; other names in <> mark generated code


class Site:
    """A source line of the user's program from which calls are made."""

    __slots__ = ("alike", "pointer", "text")

    def __init__(self, text: str, alike: bool) -> None:
        """`alike` is True if all ranks should make the call on this line."""
        self.text = text
        self.alike = alike
        self.pointer: Any = ffi.new("char[]", text.encode(errors="replace")) if text else ffi.NULL


UNKNOWN = Site("", False)
# Maps a code object's id to its sites by instruction, or to None for a library's code.
_codes: dict[int, dict[int, Site] | None] = {}
_kept: list[CodeType] = []  # keeps these code objects, so that no other object gets their ids
_libraries: tuple[str, ...] = ()  # prefixes of libraries' file names
_wanted = False
# Maps a thread to the site of its current public call. An entry exists from begin() to end().
_outer: dict[int, Site] = {}


def restart() -> None:
    """Reads FARANDOLE_CALL_SITES and finds the folders of libraries. init() calls this."""
    global _wanted, _libraries
    _outer.clear()
    _wanted = setting("FARANDOLE_CALL_SITES") != "off"
    standard = str(Path(os.__file__).parent)  # not from sysconfig, whose files may be unreadable
    _libraries = tuple(f"{folder}/" for folder in (*own_folders(), standard))


def here(depth: int) -> Site:
    """Returns the site of the call that this thread is making, or UNKNOWN if it has no user frame.

    `depth` is the number of innermost frames, including the one of here(), that are known to belong
    to farandole.
    """
    if not _wanted:
        return UNKNOWN
    if _outer and (site := _outer.get(get_ident())):
        return site
    try:
        frame: Any = _getframe(depth)
        while (sites := _codes[id(frame.f_code)]) is None:
            frame = frame.f_back
        return sites[frame.f_lasti]
    except KeyError:  # not in a table yet
        return _found(_getframe(depth))
    except (ValueError, AttributeError):  # there are no more frames
        return UNKNOWN


def begin(depth: int) -> int:
    """Gives every call of this thread the site of the present public call, until end(). Returns the
    argument for end(), or 0 if an outer call has already set a site. `depth` means the same as in
    here()."""
    if not _wanted or (own := get_ident()) in _outer:
        return 0
    _outer[own] = here(depth + 1)
    return own


# end(thread, None) undoes begin(). No signal handler can interrupt it, because it is a C function.
end = _outer.pop


def _found(frame: FrameType | None) -> Site:
    """Finds a site that is not in the table yet, and stores it there."""
    if len(_kept) >= _MOST:
        _codes.clear()
        _kept.clear()
    alike = True
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if id(code) not in _codes:
            _kept.append(code)
            _codes[id(code)] = {} if _is_users(name, frame.f_globals) else None
        sites = _codes[id(code)]
        if sites is not None:
            site = Site(f"{_file(frame)}:{frame.f_lineno}", alike)
            sites[frame.f_lasti] = site
            return site
        function, file = _UNLIKE
        unlike = name.endswith(_UNLIKE_FILE) or (code.co_name == function and name.endswith(file))
        alike = alike and not unlike
        frame = frame.f_back
    return UNKNOWN


def _is_users(name: str, module: dict[str, Any]) -> bool:
    if name.startswith("<"):
        return name in _USERS
    # torch.compile and TensorFlow generate code in temporary files, whose names differ by rank.
    if str(module.get("__name__")).split(".")[0] == "torch" or "/__autograph_generated_" in name:
        return False
    if any(folder in name for folder in ("/site-packages/", "/dist-packages/")):
        return False
    return not name.startswith(_libraries)


def _file(frame: FrameType) -> str:
    """Returns the part of the file's path that does not depend on where the program is stored."""
    path = Path(frame.f_code.co_filename)
    module = str(frame.f_globals.get("__name__", ""))
    folders = module.count(".") + (path.name == "__init__.py")
    return "/".join(path.parts[-1 - folders :])
