# SPDX-License-Identifier: Apache-2.0
"""What travels between rank 0 and the others for a checkpoint: a rank's own entries as bytes, and a
file's contents for the ranks that are there now. Without communication; for checkpoint.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from farandole import CheckpointError
from farandole.extras.checkpoints.file import Checkpoint, read
from farandole.extras.checkpoints.state import Tensors, Tree, decode, encode
from farandole.torch import merge_sharded_state_dicts

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Trees = dict[str, Tree]  # by entry

# Entries beside the user's, whose names hold no "/".
RANDOM, _TREES = "/random", "/trees"
COMPRESSION, PART = "/compression", "/part"  # behind an optimizer's name


def pack(tensors: Tensors, trees: Trees) -> Bytes:
    """Tensors and trees as bytes."""
    from safetensors.torch import save

    text = torch.frombuffer(bytearray(json.dumps(trees).encode()), dtype=torch.uint8)
    return np.frombuffer(save(tensors | {_TREES: text}), np.uint8)


def unpack(packed: Bytes) -> tuple[Tensors, Trees]:
    """What pack() was given."""
    from safetensors.torch import load

    tensors = load(packed.tobytes())
    return tensors, json.loads(tensors.pop(_TREES).numpy().tobytes())


class Parcel(NamedTuple):
    """A checkpoint for ranks that load it. Without `tensors` and `own` it is small, for all."""

    trees: Trees | None = None  # of entries that are equal on all ranks; None: nothing to load
    tensors: Tensors = {}  # noqa: RUF012  # likewise
    table: Mapping[str, tuple[torch.Size, torch.dtype]] = {}  # what they are
    own: tuple[Bytes, ...] = ()  # packed, by rank; none: the ranks have no entries of their own
    sizes: tuple[int, ...] = ()  # of these
    warning: str = ""
    refusal: tuple[str, str | None] | None = None  # a CheckpointError's arguments

    @classmethod
    def opened(cls, path: Path, ranks: int) -> Parcel:
        """From a file or folder. Never raises what read() does: it notes the refusal."""
        try:
            found = read(path)
            if found is None:
                return cls()
            if isinstance(found, Checkpoint):
                return _for_ranks(found, ranks)
            tensors: Tensors = {}
            trees = {str(name): encode(x, str(name), tensors) for name, x in found.items()}
            return _of(trees, tensors)
        except CheckpointError as reason:
            return cls(refusal=(str(reason), reason.previous))
        except (KeyError, TypeError, ValueError) as reason:
            return cls(refusal=(f"the checkpoint {path} can't be loaded: {reason}", None))


def _of(trees: Trees, tensors: Tensors, own: tuple[Bytes, ...] = (), warning: str = "") -> Parcel:
    table = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    return Parcel(trees, tensors, table, own, tuple(len(part) for part in own), warning)


def _for_ranks(checkpoint: Checkpoint, ranks: int) -> Parcel:
    document, tensors = checkpoint
    trees: Trees = document["shared"]
    own: list[tuple[Tensors, Trees]] = [({}, theirs) for theirs in document["own"]]
    for name in [name for name in tensors if name.startswith("/") and name.split("/")[1].isdigit()]:
        _, rank, inner = name.split("/", 2)
        own[int(rank)][0][inner] = tensors.pop(name)
    for name in {name for theirs in (trees, own[0][1]) for name in theirs if name.endswith(PART)}:
        _join(name, trees, tensors, own)
    if document["ranks"] == ranks:
        return _of(trees, tensors, tuple(pack(*theirs) for theirs in own))
    tensors, trees = tensors | own[0][0], trees | own[0][1]
    dropped = tuple(name for name in trees if name == RANDOM or name.endswith(COMPRESSION))
    trees = {name: tree for name, tree in trees.items() if name not in dropped}
    tensors = {name: x for name, x in tensors.items() if not name.startswith(dropped)}
    warning = (
        f"the checkpoint was written by {document['ranks']} ranks, and these are {ranks}: random "
        "generators are left as they are, residuals of compressors are dropped, and what else "
        "differed between the ranks is rank 0's"
    )
    return _of(trees, tensors, warning=warning)


def _join(name: str, trees: Trees, tensors: Tensors, own: list[tuple[Tensors, Trees]]) -> None:
    """Replaces the ranks' parts of a sharded optimizer by its full state."""
    parts = [decode((trees | theirs)[name], tensors | some) for some, theirs in own]
    for some, theirs in [(tensors, trees), *own]:
        theirs.pop(name, None)
        for tensor in [tensor for tensor in some if tensor.startswith(name)]:
            del some[tensor]
    whole = name.removesuffix(PART)
    trees[whole] = encode(merge_sharded_state_dicts(parts), whole, tensors)
