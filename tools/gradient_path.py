# SPDX-License-Identifier: Apache-2.0
"""Measures which files one small gradient passes: `python tools/gradient_path.py [checkout]`.

Builds the core with -finstrument-functions in the checkout's build/path, and runs a step on two CPU
ranks. Prints each file that rank 0 (leader and coordinator) enters, in order of first entry, and
the files that enter it while it is not on the call stack. x.h counts as x.cc, and all kernels as
one file. Omits base, lib and watch, which everything uses, unless --all is given.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType

TRACER = r"""
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>
#define PLAIN __attribute__((no_instrument_function))
struct event { intptr_t where; int32_t thread, enters; };
static struct event events[1 << 21];
static atomic_long count;
static atomic_int listens;
static __thread int32_t self;
PLAIN static void add(intptr_t where, int enters) {
  if (!listens) return;
  if (!self) self = gettid();
  long at = count++;
  if (at < (1 << 21)) events[at] = (struct event){where, self, enters};
}
PLAIN void __cyg_profile_func_enter(void* f, void* from) { add((intptr_t)f, 1); }
PLAIN void __cyg_profile_func_exit(void* f, void* from) { add((intptr_t)f, 0); }
PLAIN void trace(long file, int enters) { add(-1 - file, enters); }
PLAIN void listen_now(int yes) { listens = yes; }
PLAIN long traced(struct event** first) { *first = events; return count; }
"""
LEFT_OUT = ("csrc/base/", "csrc/lib/", "csrc/watch/")


class Event(ctypes.Structure):
    """The struct `event` of TRACER."""

    _fields_ = (("where", ctypes.c_ssize_t), ("thread", ctypes.c_int), ("enters", ctypes.c_int))


def build(root: Path) -> Path:
    """Builds the package with an instrumented core, and beside that the tracer."""
    folder = root / "build" / "path"
    tools = root / ".venv" / "bin"
    flags = "-Wno-subobject-linkage -finstrument-functions"
    flags += " -finstrument-functions-exclude-file-list=/usr/"
    cmake: list[str | Path] = [tools / "cmake", "-S", root / "csrc", "-B", folder]
    cmake += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    cmake += [f"-DCMAKE_CXX_FLAGS={flags}"]
    cmake += ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0"]  # a third of the time
    subprocess.run(cmake, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([tools / "ninja", "-C", folder, "--quiet", "farandole"], check=True)
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(root / "build" / "mypy", site, ignore=shutil.ignore_patterns("lib"))
    (site / "farandole" / "lib").mkdir()
    for path in (folder / "libfarandole.so", root / "csrc" / "farandole.h"):
        shutil.copy(path, site / "farandole" / "lib")
    (folder / "tracer.c").write_text(TRACER)
    gcc = ["gcc", "-shared", "-fPIC", "-O2"]
    subprocess.run([*gcc, "-o", folder / "tracer.so", folder / "tracer.c"], check=True)
    return folder


def events_of_a_step(tracer: ctypes.CDLL) -> tuple[list[Event], list[str]]:
    """Records the eighth step of a model with small parameters. Returns (events, Python files)."""
    import torch

    import farandole.torch as hvd

    names: dict[str, int] = {}

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "return"):
            name = frame.f_code.co_filename
            if "/farandole/" in name:
                tracer.trace(names.setdefault(name, len(names)), int(event == "call"))

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(8):
        loss = model(torch.ones(4, 8)).sum()
        if step == 7:
            tracer.listen_now(1)
            threading.setprofile(profile)
            sys.setprofile(profile)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
        tracer.listen_now(0)
        optimizer.zero_grad()
    first = ctypes.POINTER(Event)()
    count = tracer.traced(ctypes.byref(first))
    hvd.shutdown()
    return first[:count], list(names)


def source_of(name: str) -> str:
    """A path in the repository; for C++, without suffix. All kernels have one path."""
    if "csrc/" in name:
        name = "csrc/" + name.rsplit("csrc/", 1)[1].rsplit(".", 1)[0]
        return "csrc/kernels" if name.startswith("csrc/kernels/") else name
    if "farandole_kernels" in name:
        return "csrc/kernels"
    name = name.split("/site/farandole/")[-1]
    adapter = name.startswith(("torch/", "numpy/"))
    return f"{'adapters' if adapter else 'pyruntime'}/{name}"


def files_by_place(events: list[Event], python: list[str], library: Path) -> dict[int, str]:
    """Address -> file, for each address in the events."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    base = min(int(line.split("-")[0], 16) for line in lines if line.endswith(library.name))
    places = sorted({event.where for event in events if event.where >= 0})
    command = ["addr2line", "-e", str(library), *(hex(place - base) for place in places)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files = {p: source_of(f.split(":")[0]) for p, f in zip(places, found.split("\n"), strict=False)}
    return files | {-1 - number: source_of(name) for number, name in enumerate(python)}


def report(events: list[Event], files: dict[int, str], whole: bool) -> None:
    """Prints the files in order of first entry."""
    stacks: dict[int, list[str]] = defaultdict(list)
    entered_from: dict[str, dict[str, None]] = {}
    for event in events:
        file, stack = files[event.where], stacks[event.thread]
        if not event.enters:
            if file in stack:
                del stack[len(stack) - 1 - stack[::-1].index(file) :]
            continue
        if file not in stack and (whole or not file.startswith(LEFT_OUT)) and file != "??":
            told = [below for below in stack if below in entered_from]
            entered_from.setdefault(file, {})[told[-1] if told else "(begin of a thread)"] = None
        stack.append(file)
    for number, (file, callers) in enumerate(entered_from.items(), 1):
        again = f"   from {len(callers)}: {', '.join(callers)}" if len(callers) > 1 else ""
        print(f"{number:3} {file}{again}")
    several = sum(len(callers) > 1 for callers in entered_from.values())
    print(f"{len(entered_from)} files, {several} of them visited again")


def main() -> None:
    """Builds and starts two ranks. In a rank, runs the step and prints the report."""
    folder = os.environ.get("GRADIENT_PATH")
    if folder is None:
        arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        root = Path(arguments[0] if arguments else Path(__file__).parents[1]).resolve()
        made = build(root)
        changes = {"GRADIENT_PATH": str(made), "PYTHONPATH": str(made / "site")}
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        tools = root / ".venv" / "bin"
        command: list[str | Path] = [tools / "mpirun", "-np", "2", "--oversubscribe", "env"]
        command += [f"LD_PRELOAD={made / 'tracer.so'}", tools / "python", __file__, *sys.argv[1:]]
        subprocess.run(command, check=True, env=os.environ | changes)
        return
    tracer = ctypes.CDLL(str(Path(folder) / "tracer.so"))
    events, python = events_of_a_step(tracer)
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        library = Path(folder) / "site" / "farandole" / "lib" / "libfarandole.so"
        report(events, files_by_place(events, python, library), "--all" in sys.argv)


if __name__ == "__main__":
    main()
