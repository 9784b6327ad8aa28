# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint and load_checkpoint: one file for all ranks, from which training goes on bit for
bit. Public calls, for one thread at a time; the file is written on its own thread."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from farandole import (
    CheckpointError,
    ProcessSet,
    allgather_object,
    alltoall,
    broadcast_object,
    global_process_set,
    scatter,
)
from farandole.extension import COUNT, FLAG, Argument, Op, collective_then, set_id
from farandole.extras.checkpoints.file import Checkpoint, need_safetensors, write
from farandole.extras.checkpoints.parcel import (
    COMPRESSION,
    PART,
    RANDOM,
    Bytes,
    Parcel,
    pack,
    unpack,
)
from farandole.extras.checkpoints.state import (
    Tensors,
    decode,
    encode,
    random_state,
    set_random_state,
)
from farandole.torch.extension import broadcast_tensors, digest_of

_SAVE, _LOAD = "save_checkpoint", "load_checkpoint"  # their calls' names
Outcome = tuple[str | None, str | None]  # of a write: its path, or its error


class CheckpointWrite:
    """A checkpoint on its way to the disk. The program's end waits for it too."""

    def __init__(self, process_set: ProcessSet, save: Callable[[], Path] | None) -> None:
        """`save` writes it, on rank 0 of the set; None on the others."""
        self._process_set = process_set
        self._number = set_id(process_set)  # another set may have it after init()
        self._ended: Outcome | None = None  # (path, error), once all know
        self._own: Outcome = (None, None)
        self._thread = threading.Thread(target=self._run, args=(save,), name="farandole.checkpoint")
        if save is not None:
            self._thread.start()

    def wait(self) -> Path:
        """Blocks until it is on the disk; returns its path, as rank 0 sees it. Collective.

        Raises CheckpointError on all ranks if it could not be written.
        """
        if self._ended is None:
            first = (self._process_set.ranks or [0])[0]
            name = f"{_SAVE}.written"
            told = broadcast_object(self.outcome(), first, name, self._process_set)
            self.note(told or (None, "the rank that wrote the checkpoint has another place now"))
        path, error = self._ended or (None, None)
        if path is None:
            raise CheckpointError(error or "")
        return Path(path)

    def outcome(self) -> Outcome | None:
        """Path and error of this rank's thread, when it has ended; None on a rank without one."""
        if self._thread.ident is None:
            return None
        self._thread.join()
        return self._own

    def note(self, outcome: Outcome) -> None:
        """Notes what all ranks know."""
        self._ended = outcome
        if _writes.get(self._number) is self:
            del _writes[self._number]

    def _run(self, save: Callable[[], Path]) -> None:
        try:
            self._own = (str(save()), None)
        except Exception as reason:
            text = str(reason) if isinstance(reason, CheckpointError) else repr(reason)
            self._own = (None, text)


_writes: dict[int, CheckpointWrite] = {}  # by set: the last, until all ranks know how it ended


@atexit.register
def _report() -> None:
    """Prints the errors that nobody has waited for."""
    for write_ in _writes.values():
        if (outcome := write_.outcome()) is not None and outcome[1] is not None:
            print(f"farandole: {outcome[1]}", file=sys.stderr)


def _path_fault(value: Any) -> type[Exception] | None:
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        return TypeError
    return None if os.fspath(value) and "\0" not in os.fspath(value) else ValueError


def _state_fault(value: Any) -> type[Exception] | None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return TypeError
    return ValueError if any(not name or "/" in name for name in value) else None


_PATH = Argument("pass a path as a text or pathlib.Path", _path_fault)
ARGUMENTS = {
    "folder": _PATH._replace(means="of the checkpoints; it is made where it is missing"),
    "path": _PATH._replace(means="a file, or a folder of checkpoints; rank 0's counts"),
    "state": Argument(
        "pass a dict whose keys are texts without '/', such as {'model': model, 'epoch': 3}",
        _state_fault,
        "objects with state_dict() and load_state_dict(), as models, optimizers, schedulers, "
        "samplers and loaders, torch's Generators, and values: numbers, texts, tensors, NumPy's "
        "arrays, and lists and dicts of these",
    ),
    "keep": COUNT._replace(means="how many checkpoints stay in the folder; older ones are removed"),
    "wait": FLAG._replace(means="whether to return when it is written"),
}


@collective_then(Op.ALLGATHER, unnamed=_SAVE, rows=ARGUMENTS)
def save_checkpoint(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    keep: int = 3,
    wait: bool = True,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], CheckpointWrite]:
    """Writes a checkpoint of all ranks, one file in a folder that rank 0 sees; collective.

    The file is there as a whole or not at all, whatever is killed when. What is equal on all ranks
    is in it once, and what differs once for each rank: buffers of batch normalisation, the parts of
    a sharded optimizer, residuals of compressors, and the random generators of Python, NumPy and
    torch (of the CPU and the present GPU), which it always holds. Call it between two steps: no
    gradients are saved. With wait=False it returns when all has been copied, and a thread writes;
    the next save waits for it and raises its error, if nobody has called its wait(). Returns a
    CheckpointWrite, whose wait() gives the path. Needs the package safetensors.

    Raises on all ranks: CheckpointError if it can't be written, for a full disk say; TypeError for
    what a checkpoint can't hold; ValueError for entries or `wait` that differ between the ranks,
    and for a sharded optimizer of another process set.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> hvd.save_checkpoint("run", {"model": model, "epoch": 4}).wait().name
        'checkpoint-00000001.safetensors'
    """
    need_safetensors()
    number, place, target = set_id(process_set), process_set.rank(), Path(folder)
    before = _writes.get(number)
    outcome = before.outcome() if before is not None else None
    tensors: Tensors = {}
    states = dict(_states(state, process_set))
    trees = {name: encode(value, name, tensors) for name, value in states.items()}
    storages = set()
    for name, x in tensors.items():
        storage = x.untyped_storage().data_ptr()
        # Training goes on and changes them; the format refuses what shares memory, as tied weights.
        if (place == 0 and not wait) or storage in storages:
            tensors[name] = x.clone()
        storages.add(storage)
    texts = {name: json.dumps(tree) for name, tree in trees.items()}
    mine = _Summary(
        outcome,
        wait,
        {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        {name: digest_of(x) for name, x in tensors.items()},
    )

    def meet() -> CheckpointWrite:
        told = allgather_object(mine, _SAVE, process_set)
        if (ended := told[0].outcome) is not None:
            if before is not None:
                before.note(ended)
            if ended[0] is None:  # also on a rank that came after that save
                raise CheckpointError(ended[1] or "")
        if any(each.wait != wait for each in told):
            raise ValueError(f"{_SAVE}: wait is {[each.wait for each in told]}: pass one for all")
        if any(each.trees.keys() != mine.trees.keys() for each in told):
            names = [sorted(each.trees.keys() - {RANDOM}) for each in told]
            raise ValueError(f"{_SAVE}: state has different entries on the ranks: {names}")
        same_trees = set.intersection(*(set(each.trees.items()) for each in told))
        same = dict(set.intersection(*(set(each.digests.items()) for each in told)))
        own = {name: x for name, x in tensors.items() if name not in same}
        own_trees = {name: trees[name] for name, _ in mine.trees.items() - same_trees}
        parts = _gather(pack(own, own_trees), process_set)
        save = None
        if place == 0:
            found = Checkpoint({"ranks": len(told)}, {name: tensors[name] for name in same})
            found.document["shared"] = {name: trees[name] for name, _ in same_trees}
            found.document["digests"] = same
            found.document["own"] = []
            for rank, part in enumerate(parts):
                theirs, their_trees = unpack(part)
                found.document["own"].append(their_trees)
                for name, x in theirs.items():
                    found.tensors[f"/{rank}/{name}"] = x
                    same[f"/{rank}/{name}"] = told[rank].digests[name]
            save = partial(write, target, found, keep)
        handle = _writes[number] = CheckpointWrite(process_set, save)
        if wait:
            handle.wait()
        return handle

    return meet


class _Summary(NamedTuple):
    """What a rank tells the others before a save."""

    outcome: Outcome | None  # of the write before, on rank 0
    wait: bool
    trees: dict[str, str]  # by entry: SHA-256
    digests: dict[str, str]  # by tensor


def _states(state: Mapping[str, Any], process_set: ProcessSet) -> Iterator[tuple[str, Any]]:
    """The entries of a checkpoint: states of objects, other values as they are."""
    place = process_set.rank(), process_set.size()
    yield RANDOM, random_state()
    for name, value in state.items():
        part = _part_of(value)
        if part is not None:
            if (part["layout"]["part"], part["layout"]["parts"]) != place:
                raise ValueError(
                    f"state, {name}: the ranks that save are not those over which this optimizer's "
                    "state is divided: give both the same process_set, or save its state_dict()"
                )
            yield name + PART, part
        elif _is_object(value):
            yield (
                name,
                value.get_state() if isinstance(value, torch.Generator) else value.state_dict(),
            )
        else:
            yield name, value
        if hasattr(value, "compression_state_dict"):
            yield name + COMPRESSION, value.compression_state_dict()


def _part_of(value: Any) -> Any:
    """This rank's part of a sharded optimizer's state, without communication; None for all else."""
    if hasattr(value, "sharded_state_dict"):
        with contextlib.suppress(ValueError):  # of an optimizer that keeps all of its state
            return value.sharded_state_dict()
    return None


def _gather(mine: Bytes, process_set: ProcessSet) -> list[Bytes]:
    """Every rank's bytes, on the first rank of the set; collective."""
    splits = [mine.size] + [0] * ((process_set.size() or 1) - 1)
    all_, lengths = alltoall(mine, splits, name=f"{_SAVE}.own", process_set=process_set)
    return np.split(all_, np.cumsum(lengths)[:-1])


@collective_then(Op.BROADCAST, "{}.length", unnamed=f"{_LOAD}.length", rows=ARGUMENTS)
def load_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], dict[str, Any] | None]:
    """Loads a checkpoint into the objects of `state`, on all ranks; collective.

    Only rank 0 needs to see the file. Of a folder it loads the newest; it returns None if the
    folder has none, and else what belongs to no object of `state`: numbers, and states of objects
    that are left out. All bytes are compared with their checksums before anything is changed. With
    as many ranks as at the save each gets its own again, random generators included. With a
    different number the generators are left alone, residuals of compressors are dropped, and what
    else differed between the ranks is rank 0's: a warning says so. It also warns if the optimizer
    does not compress a parameter that was compressed, whose residual is dropped. Files of
    torch.save are loaded with weights_only=True.

    Raises on all ranks: CheckpointError for a missing or damaged file, whose attribute `previous`
    is the newest whole one before it, or None; ValueError for an object that the file knows nothing
    of; what the objects' load_state_dict raises, after which some may have been loaded.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> path = hvd.save_checkpoint("trained", {"model": model, "epoch": 4}).wait()
        >>> hvd.load_checkpoint("trained", {"model": model})
        {'epoch': 4}
    """
    first, place = (process_set.ranks or [0])[0], process_set.rank()
    if (under_way := _writes.get(set_id(process_set))) is not None:
        under_way.outcome()  # what it writes is what shall be found
    mine = Parcel.opened(Path(path), process_set.size() or 1) if place == 0 else Parcel()

    def meet() -> dict[str, Any] | None:
        head = broadcast_object(mine._replace(tensors={}, own=()), first, _LOAD, process_set)
        if head.refusal is not None:
            raise CheckpointError(*head.refusal)
        if head.trees is None:
            return None
        if place == 0 and head.warning:
            warnings.warn(head.warning, RuntimeWarning, stacklevel=4)
        tensors = mine.tensors
        if place != 0:
            tensors = {
                name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in head.table.items()
            }
        numbered = {str(i): x for i, x in enumerate(tensors.values())}
        broadcast_tensors(numbered, first, f"{_LOAD}.tensor", process_set)
        trees = head.trees
        if head.sizes:
            all_ = np.concatenate(mine.own) if place == 0 else np.empty(0, np.uint8)
            own = scatter(all_, first, head.sizes, name=f"{_LOAD}.own", process_set=process_set)
            own_tensors, own_trees = unpack(own)
            tensors, trees = tensors | own_tensors, trees | own_trees
        wrong, rest = None, {}
        try:
            values = {name: decode(tree, tensors) for name, tree in trees.items()}
            rest = _load(state, values, warn=place == 0)
        except Exception as reason:
            wrong = reason
        _agree(wrong, process_set)
        return rest

    return meet


def _is_object(value: Any) -> bool:
    """Whether it has a state of its own that can be loaded."""
    both = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return both or isinstance(value, torch.Generator)


def _load(state: Mapping[str, Any], values: dict[str, Any], warn: bool) -> dict[str, Any]:
    """Loads entries into objects; returns the others."""
    objects = {name: x for name, x in state.items() if _is_object(x)}
    if unknown := objects.keys() - values.keys():
        known = sorted(name for name in values if "/" not in name)
        raise ValueError(
            f"{_LOAD}: state has {sorted(unknown)}, which the checkpoint does not have: it has "
            f"{known}"
        )
    for name, x in objects.items():
        value = values.pop(name)
        x.set_state(value) if isinstance(x, torch.Generator) else x.load_state_dict(value)
        if hasattr(x, "load_compression_state_dict"):  # without residuals it forgets its own
            dropped = _load_residuals(x, values.get(name + COMPRESSION, {}))
            if dropped and warn:
                warnings.warn(
                    f"{_LOAD}: {name} does not compress {', '.join(dropped)} with error feedback, "
                    "as it did when the checkpoint was written: these residuals are dropped",
                    RuntimeWarning,
                    stacklevel=4,
                )
    if RANDOM in values:
        set_random_state(values[RANDOM])
    return {name: value for name, value in values.items() if "/" not in name}


def _load_residuals(optimizer: Any, residuals: Mapping[str, Any]) -> list[str]:
    """Loads those of parameters that this optimizer compresses; returns the names of the others."""
    own = optimizer.compression_state_dict().keys()
    optimizer.load_compression_state_dict({k: x for k, x in residuals.items() if k in own})
    return [name for name, kept in residuals.items() if kept and name not in own]


def _agree(error: Exception | None, process_set: ProcessSet) -> None:
    """Raises on all ranks the first error that one of them has; collective."""
    kinds = (ValueError, TypeError, RuntimeError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), CheckpointError)
    mine = None if error is None else (kind, str(error))
    told = allgather_object(mine, f"{_LOAD}.errors", process_set)
    for place, found in enumerate(told):
        if found is not None:
            raise found[0](f"{found[1]} (rank {place} of the process set)") from error
