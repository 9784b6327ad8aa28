# SPDX-License-Identifier: Apache-2.0
"""A library in front of libc that makes one call of a program fail, as on a machine that lacks
descriptors, memory or threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# The error of each call. Every call gets six words, which is the most that any of these takes.
_ERRORS = {
    **dict.fromkeys(("socket", "socketpair", "pipe2", "memfd_create"), "EMFILE"),
    **dict.fromkeys(("accept4", "epoll_create1", "eventfd", "dup"), "EMFILE"),
    **dict.fromkeys(("bind", "listen", "connect"), "ENOMEM"),
    **dict.fromkeys(("ftruncate", "ftruncate64", "fallocate", "fallocate64"), "ENOSPC"),
}
_SOURCE = """
#include <errno.h>
#include <string.h>
extern void *dlsym(void *, const char *);
static const char *only = "", *failed = "";
static long left;
/* The n-th of the next calls fails; of the calls with this name, unless it is "". */
void fail_call(const char *name, long n) { only = strdup(name), failed = "", left = n; }
const char *failed_call(void) { return failed; }
static int fails(const char *name) {
  if (left <= 0 || (*only && strcmp(only, name))) return 0;
  if (__atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST) != 0) return 0;
  failed = name;
  return 1;
}
#define CALL(name, code, result)                                      \\
  int name(long a, long b, long c, long d, long e, long f) {          \\
    static int (*next)(long, long, long, long, long, long);           \\
    if (fails(#name)) {                                               \\
      errno = code;                                                   \\
      return result;                                                  \\
    }                                                                 \\
    if (!next) next = dlsym((void *)-1L, #name);                      \\
    return next(a, b, c, d, e, f);                                    \\
  }
CALL(pthread_create, EAGAIN, EAGAIN)
"""

# What a program needs to make calls fail.
FAILS = """
import ctypes
_libc = ctypes.CDLL(None)
_libc.failed_call.restype = ctypes.c_char_p

def fail(number, name=""):
    _libc.fail_call(name.encode(), ctypes.c_long(number))

def failed():
    return _libc.failed_call().decode()
"""


def build(folder: Path) -> str:
    """The path of the library, for LD_PRELOAD."""
    source, library = folder / "failing.c", folder / "failing.so"
    calls = (f"CALL({name}, {code}, -1)" for name, code in _ERRORS.items())
    source.write_text("\n".join((_SOURCE, *calls, "")))
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)
