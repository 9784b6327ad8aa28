# SPDX-License-Identifier: Apache-2.0
"""torch.testing._internal.distributed.distributed_test with gloo's name replaced by BACKEND, in
WORLD_SIZE forked ranks, which meet by a file. For pytest, by run.py."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import multiprocessing
from torch.testing._internal import common_distributed

ORIGIN = "torch.testing._internal.distributed.distributed_test"
SECONDS = 60  # for a test, but for those that torch gives a time of their own


def _load(backend: str) -> ModuleType:
    """torch's tests as a module, for that backend."""
    spec = importlib.util.find_spec(ORIGIN)
    assert spec is not None
    assert spec.origin is not None
    copy = Path(tempfile.mkdtemp(), "distributed_test.py")
    copy.write_text(Path(spec.origin).read_text().replace('"gloo"', f'"{backend}"'))
    for feature in common_distributed.DistTestCases.backend_feature.values():
        feature.add(backend)
    sys.path.insert(0, str(copy.parent))
    return importlib.import_module(copy.stem)


common_distributed.TIMEOUT_DEFAULT = SECONDS
torch.set_num_threads(1)
_tests: Any = _load(os.environ["BACKEND"])


class TestForked(_tests.TestDistBackend, _tests.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests, each in ranks that are forked from this process."""

    def setUp(self) -> None:
        """Forks them."""
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *arguments: Any, **options: Any) -> None:
        import farandole.torch  # noqa: F401 (registers the backend; a rank is no fork of a user)

        super()._run(*arguments, **options)
