# SPDX-License-Identifier: Apache-2.0
"""Thread-safe helpers that scripts and libraries import from horovod.common.util."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from farandole.errors import HorovodVersionMismatchError
from farandole.features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)
from farandole.ops import ReduceOp

__all__ = [
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "check_num_rank_power_of_2",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "in_thread",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True if both the adapter, such as "torch" or "numpy", and its framework are installed."""
    try:
        found = importlib.util.find_spec(f"farandole.{ext_base_name}") is not None
        return found and importlib.util.find_spec(ext_base_name) is not None
    except ModuleNotFoundError:
        return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError if `ext_name`, such as "horovod.torch", has no installed adapter."""
    name = ext_name.removeprefix("horovod.")
    if not extension_available(name):
        raise ImportError(f"{ext_name} cannot be used: {name} or its adapter is not installed")


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Does nothing. farandole is not compiled against a framework, so every version fits."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True if the framework may use a GPU."""
    if ext_base_name != "torch":
        return False
    import torch

    return torch.cuda.is_available()


def split_list(values: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Cuts `values` into `num_parts` slices whose lengths differ by at most one, longest first."""
    size, longer = divmod(len(values), num_parts)
    ends = [(i + 1) * size + min(i + 1, longer) for i in range(num_parts)]
    return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """True if the number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """True if Adasum supports `num_rank` ranks. farandole's Adasum supports any number."""
    return num_rank > 0


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls `target(*args)` on a new thread and returns the thread. If `silent`, ignores errors."""

    def quiet() -> None:
        with suppress(Exception):
            target(*args)

    def loud() -> None:
        target(*args)

    thread = threading.Thread(target=quiet if silent else loud, name=name, daemon=daemon)
    thread.start()
    return thread


def is_iterable(x: Any) -> bool:
    """True if `x` can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns True if version `ver`, such as "2.1.0", is `target` or newer. Raises ValueError
    unless both versions have three numbers."""
    numbers = [int(part) for part in ver.split("+")[0].split(".")[:3]]
    wanted = [int(part) for part in target.split(".")]
    if len(numbers) < 3 or len(wanted) < 3:
        raise ValueError(f"versions have three numbers, not {ver!r} and {target!r}")
    return numbers >= wanted


@contextmanager
def env(**kwargs: str) -> Iterator[None]:
    """Context manager that sets environment variables and restores the old values at the end."""
    before = {name: os.environ.get(name) for name in kwargs}
    os.environ.update(kwargs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that chooses the reduction from the arguments (op, average). `reduce_ops`
    has the attributes Average and Sum."""

    def choose(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("pass op or average, not both")
        if average is not None:
            return reduce_ops.Average if average else reduce_ops.Sum
        return reduce_ops.Average if op is None else op

    return choose


def handle_average_backwards_compatibility(op: Any, average: bool | None) -> Any:
    """Returns the reduction that is selected by `op` or by Horovod's older argument `average`."""
    return get_average_backwards_compatibility_fun(ReduceOp)(op, average)
