# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: numbered safetensors files in a folder, each written whole or not at all,
and checked when read. For rank 0 alone, on the thread that saves or loads."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from farandole import CheckpointError
from farandole.extension import DOCUMENT, check_digests, document_of, metadata_of
from farandole.extras.checkpoints.state import Tensors
from farandole.torch.extension import digest_of

_NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")
_FILES = (".safetensors", ".pt", ".pth")  # a path that ends so is no folder
_PART = ".part"  # a folder beside the checkpoints: what a killed job leaves is there


class Checkpoint(NamedTuple):
    """What a file holds."""

    document: dict[str, Any]
    tensors: Tensors


def need_safetensors() -> None:
    """Raises ImportError, with the remedy, where the package is missing."""
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as reason:
        raise ImportError("checkpoints need safetensors: `pip install safetensors`") from reason


def write(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes the next checkpoint of a folder, then removes all but the last `keep`.

    It has its name only when all of it is on the disk: a kill or a power cut at any point leaves
    the files before it as they were. Raises CheckpointError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = metadata_of(checkpoint.document)
    part = folder / _PART
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync(folder.parent)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        before = _numbered(folder)
        path = folder / f"checkpoint-{before[-1][0] + 1 if before else 1:08}.safetensors"
        temporary = part / path.name
        save_file(checkpoint.tensors, temporary, metadata)
        temporary.chmod(part.stat().st_mode & 0o666)  # as the umask wants it; the library's is 600
        _sync(temporary)
        temporary.rename(path)
        _sync(folder)
        part.rmdir()
        for _, old in [*before, (0, path)][:-keep]:
            old.unlink()
    except (OSError, SafetensorError) as reason:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"no checkpoint was written to {folder}: {reason}") from reason
    return path


def read(path: Path) -> Checkpoint | dict[str, Any] | None:
    """A checkpoint, of a file or the newest of a folder; None for a folder that has none.

    Each byte has been compared with its checksum. What torch.save has written is given as it is.
    Raises CheckpointError; for a damaged file that offers the newest whole one before it.
    """
    try:
        if path.is_file() and path.suffix != ".safetensors":
            return _read_pickled(path)
        if path.suffix not in _FILES:
            numbered = _numbered(path)
            if not numbered:
                return None
            path = numbered[-1][1]
        try:
            return _checked(path)
        except CheckpointError as reason:
            raise CheckpointError(*_offer(path, str(reason))) from reason
    except OSError as reason:
        raise CheckpointError(f"the checkpoint {path} can't be read: {reason}") from reason


def _offer(path: Path, text: str) -> tuple[str, str | None]:
    """The text of an error with the newest whole checkpoint that is older than a damaged one."""
    own = _NAME.fullmatch(path.name)
    for number, other in reversed(_numbered(path.parent)):
        if own is not None and number < int(own[1]):
            with contextlib.suppress(CheckpointError):
                _checked(other)
                return f"{text}; the one before it is whole: load {other}", str(other)
    return text, None


def _checked(path: Path) -> Checkpoint:
    need_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as reason:
        raise CheckpointError(f"the checkpoint {path} is missing or damaged: {reason}") from reason
    if DOCUMENT not in metadata:
        raise CheckpointError(f"{path} was not written by farandole.torch.save_checkpoint")
    try:
        document = document_of(metadata)
        check_digests({name: digest_of(x) for name, x in tensors.items()}, document)
    except ValueError as reason:
        raise CheckpointError(f"the checkpoint {path} is damaged: {reason}") from reason
    return Checkpoint(document, tensors)


def _read_pickled(path: Path) -> dict[str, Any]:
    """What torch.save has written, without running code. Raises CheckpointError."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as reason:  # of many classes, by what is wrong
        text = str(reason).partition("\n")[0]
        raise CheckpointError(
            f"{path} holds no checkpoint that is safe to load: {text}"
        ) from reason
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict of states")
    return found


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder with their numbers, ascending."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(m[1]), path) for path in paths if (m := _NAME.fullmatch(path.name)))


def _sync(path: Path) -> None:
    """Returns when a file or folder is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
