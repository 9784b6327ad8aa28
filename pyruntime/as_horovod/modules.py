# SPDX-License-Identifier: Apache-2.0
"""A table of Horovod's modules, and an import finder that creates them on the importing thread."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Maps each module to the sources of its names. The source `module` stands for all names of that
# module. The source `module:A B=C` stands for its A, and for its C under the name B. As in Horovod,
# submodules are attributes of their package.
_RANKS = "farandole:cross_rank cross_size is_initialized local_rank local_size rank size"
_SETS = "farandole:ProcessSet add_process_set global_process_set remove_process_set"
_FAILURE = "farandole.errors:HorovodInternalError=FarandoleError"
_LIFE = "farandole:init shutdown"
_ENDED = "farandole.errors:HostsUpdatedInterrupt"
_ELASTIC = "farandole.elastic:ObjectState State run_fn"
_KERAS_CALLBACKS = (
    "farandole.keras.callbacks:BestModelCheckpoint BroadcastGlobalVariablesCallback "
    "LearningRateScheduleCallback LearningRateWarmupCallback MetricAverageCallback"
)
_KERAS_ELASTIC = (
    "farandole.keras.elastic:CommitStateCallback KerasState UpdateBatchStateCallback "
    "UpdateEpochStateCallback run",
    "farandole.tensorflow.elastic:TensorFlowKerasState",
)
_TF = "farandole.tensorflow"
TABLE: dict[str, tuple[str, ...]] = {
    "horovod.common": (),
    "horovod.common.basics": ("farandole.as_horovod.basics", _SETS),
    "horovod.common.elastic": (_ELASTIC, _ENDED, _FAILURE),
    "horovod.common.exceptions": (_FAILURE, "farandole.errors:HorovodVersionMismatchError", _ENDED),
    "horovod.common.process_sets": (
        _SETS,
        "farandole.as_horovod.basics",
        "farandole.as_horovod.util:is_iterable",
    ),
    "horovod.common.util": ("farandole.as_horovod.util",),
    "horovod.data": ("farandole.as_horovod.loaders",),
    "horovod.data.data_loader_base": ("farandole.as_horovod.loaders",),
    "horovod.metadata": ("horovod:__version__",),
    "horovod.runner": ("horovod:run",),
    "horovod.runner.util": (),
    "horovod.runner.util.threads": ("farandole.as_horovod.util:in_thread",),
    # ---- PyTorch
    "horovod.torch": ("farandole.torch", "farandole.as_horovod.util:check_extension"),
    "horovod.torch.compression": (
        "farandole.torch.compression:Compression Compressor",
        "farandole.torch.compression:FP16Compressor=Compression.fp16",
        "farandole.torch.compression:NoneCompressor=Compression.none",
    ),
    "horovod.torch.elastic": ("farandole.torch.elastic", "farandole.elastic:run_fn", _LIFE),
    "horovod.torch.elastic.sampler": ("farandole.torch.elastic:ElasticSampler", _RANKS),
    "horovod.torch.elastic.state": (
        "farandole.torch.elastic",
        "farandole.torch.elastic:ModelStateHandler OptimizerStateHandler SamplerStateHandler",
        "farandole.torch:broadcast_object broadcast_optimizer_state broadcast_parameters",
        "farandole.torch:allgather_object",
        _RANKS,
    ),
    "horovod.torch.functions": (
        "farandole.torch:allgather allgather_object broadcast_ broadcast_async_ broadcast_object",
        "farandole.torch:broadcast_optimizer_state broadcast_parameters synchronize",
        _RANKS,
        _SETS,
    ),
    "horovod.torch.mpi_ops": (
        "farandole.torch.mpi_ops",
        "farandole.torch:Compression",
        "farandole.as_horovod.util:check_installed_version gpu_available num_rank_is_power_2",
        "farandole.as_horovod.util:get_average_backwards_compatibility_fun",
        "farandole.as_horovod.util:handle_average_backwards_compatibility",
    ),
    "horovod.torch.optimizer": (
        "farandole.torch:Adasum Average Compression DistributedOptimizer Sum allreduce_async_",
        "farandole.torch:broadcast_object grouped_allreduce_async_ rocm_built synchronize",
        "farandole.torch:sparse_allreduce_async",
        "farandole.as_horovod.util:split_list",
        _RANKS,
        _SETS,
    ),
    "horovod.torch.sync_batch_norm": (
        "farandole.torch:Sum SyncBatchNorm allgather_async allreduce_async synchronize",
        _RANKS,
    ),
    # ---- TensorFlow
    "horovod.tensorflow": (_TF, "farandole.as_horovod.util"),
    "horovod.tensorflow.compression": (
        f"{_TF}:Compression FP16Compressor=Compression.fp16 NoneCompressor=Compression.none",
    ),
    "horovod.tensorflow.elastic": (
        f"{_TF}.elastic",
        f"{_TF}:broadcast_object broadcast_variables",
        "farandole.elastic:run_fn",
        _FAILURE,
        _RANKS,
        _LIFE,
    ),
    "horovod.tensorflow.functions": (
        f"{_TF}:allgather allgather_object broadcast broadcast_object broadcast_variables",
        _RANKS,
        _SETS,
    ),
    "horovod.tensorflow.mpi_ops": (_TF, "farandole.as_horovod.util"),
    "horovod.tensorflow.sync_batch_norm": (f"{_TF}:Sum SyncBatchNormalization", _RANKS),
    # ---- Keras
    "horovod.keras": ("farandole.keras",),
    "horovod.keras.callbacks": (_KERAS_CALLBACKS,),
    "horovod.keras.elastic": _KERAS_ELASTIC,
    "horovod.tensorflow.keras": ("farandole.keras", "farandole.as_horovod.util"),
    "horovod.tensorflow.keras.callbacks": (_KERAS_CALLBACKS,),
    "horovod.tensorflow.keras.elastic": _KERAS_ELASTIC,
}
# Modules that farandole lacks, and what to use instead.
INSTEAD = {
    "horovod.mxnet": "MXNet has been archived since 2023; farandole has adapters for PyTorch, JAX, "
    "TensorFlow and Keras",
    "horovod.ray": "start ranks with `farandole run -np N python train.py`",
    "horovod.spark": "write the data to files that all hosts can read, and start ranks with "
    "`farandole run -np N python train.py` or farandole.run(train, np=N)",
}


class HorovodFinder(MetaPathFinder, Loader):
    """Creates the modules in TABLE on import. Errors for modules in INSTEAD name a remedy."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec for a module in TABLE. Raises ImportError for a module in INSTEAD."""
        if name in INSTEAD:
            raise ImportError(f"{name} is not part of farandole: {INSTEAD[name]}", name=name)
        if name not in TABLE:
            return None
        spec = ModuleSpec(name, self, origin=f"farandole's table of Horovod's modules ({__file__})")
        spec.submodule_search_locations = [] if _children(name) else None
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module, then imports its submodules. Raises the errors of these imports."""
        name = module.__name__
        names: set[str] = set()
        for source in TABLE[name]:
            names |= _fill(module, source)
        for child in _children(name):
            importlib.import_module(f"{name}.{child}")
            names.add(child)
        module.__dict__["__all__"] = sorted(names)
        module.__doc__ = f"{name}: farandole's calls under Horovod's names."


def _children(name: str) -> list[str]:
    """Returns the submodules to import with a package. Omits those in LATE, because TensorFlow must
    load without Keras."""
    inner = [row.removeprefix(f"{name}.") for row in TABLE if row.startswith(f"{name}.")]
    return [row for row in inner if "." not in row and f"{name}.{row}" not in LATE]


LATE = {"horovod.tensorflow.keras"}  # not imported with its package


def _fill(module: ModuleType, source: str) -> set[str]:
    place, _, words = source.partition(":")
    found = importlib.import_module(place)
    pairs = [word.partition("=")[::2] for word in words.split() or found.__all__]
    for name, path in pairs:
        value = found
        for part in (path or name).split("."):
            value = getattr(value, part)
        module.__dict__[name] = value
    return {name for name, _ in pairs}
