# SPDX-License-Identifier: Apache-2.0
"""Call sites: the line of the user's program that makes a call, as the core records and compares
it. Every call looks it up on its caller's thread, so a line that is known costs no more than a few
look-ups in tables.

A site is found from the inside: of the frames that are neither farandole's, torch's nor of another
library, the innermost one. It is text that is equal on all hosts, wherever they keep the program:
file:line, of which the file has as many folders as the module's name has dots.
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

_MOST = 10_000  # code objects that are remembered
# Of torch.distributed, what makes calls in which all ranks do the same, though ranks use it in
# different ways: functions of a file, and a file.
_UNLIKE = ("gather_object", "torch/distributed/distributed_c10d.py")
_UNLIKE_FILE = "torch/distributed/algorithms/join.py"
_USERS = ("<stdin>", "<string>")  # programs without a file; other such names are of made code


class Site:
    """A line that makes calls."""

    __slots__ = ("alike", "pointer", "text")

    def __init__(self, text: str, alike: bool) -> None:
        """`alike`: whether all ranks should be in this line, where they all do the same."""
        self.text = text
        self.alike = alike
        self.pointer: Any = ffi.new("char[]", text.encode(errors="replace")) if text else ffi.NULL


UNKNOWN = Site("", False)
# By id of a code object: the sites in it, by place; None: it is a library's.
_codes: dict[int, dict[int, Site] | None] = {}
_kept: list[CodeType] = []  # those objects, so that others don't get their ids
_libraries: tuple[str, ...] = ()  # how names of libraries' files begin
_wanted = False
# By thread: the site of the public call that it is in, if that has looked it up. See begin().
_outer: dict[int, Site] = {}


def restart() -> None:
    """Reads FARANDOLE_CALL_SITES. init() calls this."""
    global _wanted, _libraries
    _outer.clear()
    _wanted = setting("FARANDOLE_CALL_SITES") != "off"
    standard = str(Path(os.__file__).parent)  # sysconfig reads files, which this user may not
    _libraries = tuple(f"{folder}/" for folder in (*own_folders(), standard))


def here(depth: int) -> Site:
    """The site of the call under way; UNKNOWN if no frame is the user's.

    `depth`: how many of the innermost frames, this one included, are known to be farandole's.
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
    except KeyError:  # of a table
        return _found(_getframe(depth))
    except (ValueError, AttributeError):  # there are no more frames
        return UNKNOWN


def begin(depth: int) -> int:
    """Gives all calls of this thread until end() the site of the call under way, unless they have
    one; returns what to pass to end(), 0: nothing. `depth`: as in here()."""
    if not _wanted or (own := get_ident()) in _outer:
        return 0
    _outer[own] = here(depth + 1)
    return own


# end(own, None): calls of the thread look up their sites again. No signal handler raises in it.
end = _outer.pop


def _found(frame: FrameType | None) -> Site:
    """The site of a call whose line is not known yet; keeps what it finds."""
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
    # Code that torch.compile or TensorFlow has made lies in temporary files, others on each rank.
    if str(module.get("__name__")).split(".")[0] == "torch" or "/__autograph_generated_" in name:
        return False
    if any(folder in name for folder in ("/site-packages/", "/dist-packages/")):
        return False
    return not name.startswith(_libraries)


def _file(frame: FrameType) -> str:
    """The end of a file's name that does not depend on where the program lies."""
    path = Path(frame.f_code.co_filename)
    module = str(frame.f_globals.get("__name__", ""))
    folders = module.count(".") + (path.name == "__init__.py")
    return "/".join(path.parts[-1 - folders :])
