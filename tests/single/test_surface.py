# SPDX-License-Identifier: Apache-2.0
"""Every public name and argument of Horovod 0.28 that torch users meet."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from farandole import as_horovod
from farandole.torch import elastic, mpi_ops


def _modules() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    module = ""
    for line in Path(__file__).with_name("horovod_names.txt").read_text().splitlines():
        if line.startswith("horovod"):
            module, _, line = line.partition(":")
            found[module] = []
        if not line.startswith("#"):
            found[module] += line.split()
    return found


MODULES = _modules()

PS = ("process_set", hvd.global_process_set)
NAME, NONE = ("name", None), ("compression", hvd.Compression.none)
FACTORS = (("prescale_factor", 1.0), ("postscale_factor", 1.0))
REDUCE = (("average", None), NAME, ("op", None), *FACTORS, PS)
REDUCE_WAITING = (*REDUCE[:2], NONE, *REDUCE[2:])
SCATTER = (NAME, ("op", hvd.Average), PS, *FACTORS)
SCATTER_WAITING = (NAME, NONE, *SCATTER[1:])
SPLITS = ("splits", None)

# (name, default) in order; a bare name has no default.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "init": (("comm", None), ("process_sets", None)),
    "shutdown": (),
    "is_initialized": (),
    "start_timeline": ("file_path", ("mark_cycles", False)),
    "stop_timeline": (),
    **{f"{a}{b}": () for a in ("", "local_", "cross_") for b in ("size", "rank")},
    "mpi_ops.is_homogeneous": (),
    "allreduce": ("tensor", *REDUCE_WAITING),
    "grouped_allreduce": ("tensors", *REDUCE_WAITING),
    **{f"allreduce{form}": ("tensor", *REDUCE) for form in ("_async", "_", "_async_")},
    **{f"grouped_allreduce{form}": ("tensors", *REDUCE) for form in ("_async", "_", "_async_")},
    "sparse_allreduce_async": ("tensor", "name", "op", PS),
    **{f"allgather{form}": ("tensor", NAME, PS) for form in ("", "_async")},
    **{f"grouped_allgather{form}": ("tensors", NAME, PS) for form in ("", "_async")},
    **{
        f"broadcast{form}": ("tensor", "root_rank", NAME, PS)
        for form in ("", "_async", "_", "_async_")
    },
    **{f"alltoall{form}": ("tensor", SPLITS, NAME, PS) for form in ("", "_async")},
    "reducescatter": ("tensor", *SCATTER_WAITING),
    "reducescatter_async": ("tensor", *SCATTER),
    "grouped_reducescatter": ("tensors", *SCATTER_WAITING),
    "grouped_reducescatter_async": ("tensors", *SCATTER),
    "join": (("device", -1),),
    "barrier": (PS,),
    "poll": ("handle",),
    "synchronize": ("handle",),
    "ProcessSet": ("ranks_or_comm",),
    "add_process_set": ("process_set",),
    "remove_process_set": ("process_set",),
    "DistributedOptimizer": (
        "optimizer",
        ("named_parameters", None),
        NONE,
        ("backward_passes_per_step", 1),
        ("op", hvd.Average),
        ("gradient_predivide_factor", 1.0),
        ("num_groups", 0),
        ("groups", None),
        ("sparse_as_dense", False),
        PS,
    ),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", ("model", None)),
    "broadcast_object": ("obj", ("root_rank", 0), NAME, PS),
    "allgather_object": ("obj", NAME),
    "SyncBatchNorm": (
        "num_features",
        ("eps", 1e-5),
        ("momentum", 0.1),
        ("affine", True),
        ("track_running_stats", True),
    ),
    "elastic.run": ("func",),
    "elastic.TorchState": (("model", None), ("optimizer", None)),
    "elastic.ElasticSampler": ("dataset", ("shuffle", True), ("seed", 0)),
}

MEMBERS = {
    "Compression": ("none", "fp16"),
    "ProcessSet([0])": ("process_set_id", "ranks", "mpi_comm", "size", "rank", "included"),
    "elastic.TorchState()": (
        *("save", "restore", "sync", "commit", "check_host_updates", "register_reset_callbacks"),
        *("on_reset", "reset", "on_hosts_updated"),
    ),
    "elastic.ElasticSampler([0])": (
        *("set_epoch", "record_batch", "state_dict", "load_state_dict", "reset"),
    ),
    "optimizer": (
        *("step", "synchronize", "skip_synchronize", "zero_grad", "load_state_dict"),
        *("backward_passes_per_step", "set_backward_passes_per_step"),
    ),
}


def found(path: str) -> Any:
    """The object that a dotted name means; None where it is missing."""
    value: Any = {"mpi_ops": mpi_ops, "elastic": elastic}.get(path.split(".")[0], hvd)
    return getattr(value, path.rpartition(".")[2], None)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_takes_horovods_arguments(name: str) -> None:
    given = list(inspect.signature(found(name)).parameters.values())
    for argument, ours in zip(SIGNATURES[name], given, strict=False):
        key, default = argument if isinstance(argument, tuple) else (argument, ours.default)
        assert ours.name == key
        assert ours.default is default or ours.default == default, key
    assert len(SIGNATURES[name]) <= len(given)


@pytest.fixture
def _alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("_alone")
def test_objects_have_horovods_members() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    makers: dict[str, Any] = {
        "Compression": lambda: hvd.Compression,
        "ProcessSet([0])": lambda: hvd.ProcessSet([0]),
        "elastic.TorchState()": lambda: elastic.TorchState(),
        "elastic.ElasticSampler([0])": lambda: elastic.ElasticSampler([0]),
        "optimizer": lambda: hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0)),
    }
    for owner, wanted in MEMBERS.items():
        value = makers[owner]()
        assert not [name for name in wanted if not hasattr(value, name)], owner


def test_what_is_exported_is_there() -> None:
    """All of horovod.torch but a check of its extension, which a script has no use for."""
    assert set(MODULES["horovod.torch"]) - set(hvd.__all__) == {"check_extension"}
    for name in hvd.__all__:
        assert hasattr(hvd, name)
        assert name not in mpi_ops.__all__ or getattr(hvd, name) is getattr(mpi_ops, name)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package `horovod`, as scripts see it under `python -m farandole.as_horovod`."""
    before = list(sys.meta_path)
    monkeypatch.syspath_prepend(as_horovod.FOLDER)
    yield importlib.import_module("horovod")
    sys.meta_path[:] = before
    for name in [n for n in sys.modules if n.partition(".")[0] == "horovod"]:
        del sys.modules[name]


# What Horovod's modules have and ours do not, and why. Nothing else may be missing.
_BUILT = "Horovod compiles an extension for each framework; farandole has none"
_NOTICES = "Horovod's own protocol between its elastic driver and its workers"
LEFT_OUT = {
    **dict.fromkeys(["EXTENSIONS", "get_ext_suffix", "get_extension_full_path"], _BUILT),
    **dict.fromkeys(["get_version_mismatch_message", "mpi_lib", "torch"], _BUILT),
    **dict.fromkeys(["HostUpdateResult", "WorkerNotificationManager"], _NOTICES),
    "notification_manager": _NOTICES,
}


def left_out(name: str) -> bool:
    """Horovod{Allreduce,...}: its own autograd functions, which users do not call."""
    return name in LEFT_OUT or (name.startswith("Horovod") and name[7:] in AUTOGRAD)


AUTOGRAD = """
Allgather Allreduce Alltoall Broadcast GroupedAllgather GroupedAllreduce GroupedReducescatter
Reducescatter
""".split()  # noqa: SIM905


@pytest.mark.parametrize("module", [m for m in MODULES if not re.search("keras|tensorflow", m)])
def test_a_module_has_horovods_names(horovod: Any, module: str) -> None:
    found = importlib.import_module(module)
    missing = {name for name in MODULES[module] if not hasattr(found, name)}
    assert missing == {name for name in MODULES[module] if left_out(name)}


def test_submodules_are_attributes(horovod: Any) -> None:
    """As Horovod's own import leaves them: ignite says hvd.mpi_ops.Sum."""
    shim: Any = importlib.import_module("horovod.torch")
    assert shim.mpi_ops.Sum is hvd.Sum
    assert shim.elastic.state.TorchState is shim.elastic.TorchState is elastic.TorchState
    assert shim.compression.FP16Compressor is hvd.Compression.fp16
    assert set(hvd.__all__) <= set(shim.__all__)
    assert importlib.import_module("horovod.runner").run is horovod.run
    assert horovod.__version__ == importlib.import_module("horovod.metadata").__version__
    for name in ("functions", "optimizer", "compression", "sync_batch_norm"):
        assert getattr(shim, name) is sys.modules[f"horovod.torch.{name}"]


def test_a_call_before_init_names_what_was_imported(horovod: Any) -> None:
    with pytest.raises(ValueError, match=r"^Horovod has not been initialized: call init"):
        hvd.rank()


@pytest.mark.parametrize("module", ["horovod.spark", "horovod.ray", "horovod.spark.keras"])
def test_what_is_not_here_says_what_is(horovod: Any, module: str) -> None:
    with pytest.raises(ImportError, match="farandole run -np N"):
        importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod.run.runner")  # Horovod's older name, which ignite tries


def test_async_data_loader(horovod: Any) -> None:
    data: Any = importlib.import_module("horovod.data")

    class Loader(data.BaseDataLoader):  # type: ignore[misc]
        def __init__(self, batches: int, broken: BaseException | None = None) -> None:
            self.batches, self.broken = batches, broken

        def __len__(self) -> int:
            return self.batches

        def _iterate(self) -> Iterator[int]:
            self.ahead = threading.current_thread() is not threading.main_thread()
            yield from range(self.batches)
            if self.broken:
                raise self.broken

        def _process_batch(self, batch: int) -> int:
            return batch * 10

    class Ahead(data.AsyncDataLoaderMixin, Loader):  # type: ignore[misc]
        pass

    for size in (0, 1, 64):
        loader = Ahead(async_loader_queue_size=size, batches=5)
        assert list(loader) == list(loader) == [0, 10, 20, 30, 40]
        assert loader.ahead == (size > 0)
        left = iter(loader)
        assert next(left) == 0  # and no more of it
        loader.close_async_loader()
        if size > 0:
            with pytest.raises(RuntimeError, match="has ended this one"):
                next(left)
        for error in (OSError("disk"), SystemExit("disk")):
            with pytest.raises(type(error), match="disk"):
                list(Ahead(size, 3, broken=error))
