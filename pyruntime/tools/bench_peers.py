# SPDX-License-Identifier: Apache-2.0
"""The implementations that `farandole bench` compares: farandole, MPI and Gloo."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole
from farandole.tools.bench_cases import COLLECTIVES, DTYPES, Array, Case, Operand

Run = Callable[[], Array]  # makes one blocking call and returns the call's output


class Peer(ABC):
    """One implementation of the collectives. All ranks create it together, and close it together.

    Only one thread per rank may call the methods.
    """

    name: str
    dtypes: tuple[str, ...] = tuple(DTYPES)
    collectives: tuple[str, ...] = tuple(COLLECTIVES)

    def supports(self, case: Case) -> bool:
        """Returns True if prepare() supports this case."""
        return case.collective.name in self.collectives and case.dtype in self.dtypes

    @abstractmethod
    def prepare(self, x: Operand) -> Run:
        """Returns a function that runs the collective. allreduce and broadcast run in place."""

    def close(self) -> None:  # noqa: B027 (nothing to end is the common case)
        """Releases resources. This is a collective."""


class FarandolePeer(Peer):
    """farandole's framework-neutral calls."""

    name = "farandole"

    def prepare(self, x: Operand) -> Run:
        """Returns a function that runs the operand's collective."""
        array = x.array
        runs: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: farandole.allreduce_(array, op=farandole.Sum),
            "broadcast": lambda: farandole.broadcast_(array, 0),
            "allgather": lambda: farandole.allgather(array),
            "reducescatter": lambda: farandole.reducescatter(array, op=farandole.Sum),
            "alltoall": lambda: farandole.alltoall(array),
        }
        return runs[x.case.collective.name]


class ZeroCopyPeer(FarandolePeer):
    """farandole's calls on arrays from farandole.empty(), which no collective copies."""

    name = "zerocopy"

    def prepare(self, x: Operand) -> Run:
        """Allocates the operand's array with empty(). Returns a function that runs the call."""
        x.array = farandole.empty(x.array.size, x.array.dtype)
        return super().prepare(x)


class MpiPeer(Peer):
    """mpi4py's calls for buffers on the world's communicator."""

    name = "mpi"
    dtypes = ("float32", "float64")

    def prepare(self, x: Operand) -> Run:
        """Returns a function that runs the operand's collective in MPI."""
        from mpi4py import MPI

        world, array, case = MPI.COMM_WORLD, x.array, x.case
        out = np.empty(case.output_count, array.dtype)
        runs: dict[str, tuple[Callable[[], Any], Array]] = {
            "allreduce": (lambda: world.Allreduce(MPI.IN_PLACE, array, MPI.SUM), array),
            "broadcast": (lambda: world.Bcast(array, 0), array),
            "allgather": (lambda: world.Allgather(array, out), out),
            "reducescatter": (lambda: world.Reduce_scatter_block(array, out, MPI.SUM), out),
            "alltoall": (lambda: world.Alltoall(array, out), out),
        }
        run, result = runs[case.collective.name]

        def call() -> Array:
            run()
            return result

        return call


class GlooPeer(Peer):
    """torch.distributed with the gloo backend and one torch thread."""

    name = "gloo"

    def __init__(self) -> None:
        """Joins or creates torch's default process group. Raises ImportError without torch."""
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._dist: Any = torch.distributed
        self._from_numpy: Any = torch.from_numpy
        self._mine = not self._dist.is_initialized()
        if self._mine:
            self._join(farandole.rank(), farandole.size(), farandole.cross_size() == 1)

    def _join(self, rank: int, size: int, one_host: bool) -> None:
        """Creates torch's process group at a free port of rank 0, on loopback if `one_host`."""
        if one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1" if one_host else socket.gethostname()
        tcp = self._dist.TCPStore
        store = tcp(host, 0, size, True, wait_for_workers=False) if rank == 0 else None
        address = farandole.broadcast_object((host, store.port if store else 0), 0)
        store = store or tcp(*address, size)
        self._dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def prepare(self, x: Operand) -> Run:
        """Returns a function that runs the operand's collective in torch.distributed."""
        dist, case = self._dist, x.case
        tensor = self._from_numpy(x.array)
        out = tensor.new_empty(case.output_count)
        gather = self._call("all_gather_single", "all_gather_into_tensor")
        scatter = self._call("reduce_scatter_single", "reduce_scatter_tensor")
        runs: dict[str, tuple[Callable[[], Any], Any]] = {
            "allreduce": (lambda: dist.all_reduce(tensor), tensor),
            "broadcast": (lambda: dist.broadcast(tensor, 0), tensor),
            "allgather": (lambda: gather(out, tensor), out),
            "reducescatter": (lambda: scatter(out, tensor), out),
            "alltoall": (lambda: dist.all_to_all_single(out, tensor), out),
        }
        run, result = runs[case.collective.name]

        def call() -> Array:
            run()
            return np.asarray(result.numpy())

        return call

    def _call(self, name: str, before: str) -> Callable[[Any, Any], Any]:
        """Returns the function with this name, or `before`, its name before torch 2.13."""
        call: Callable[[Any, Any], Any] = getattr(self._dist, name, None) or getattr(
            self._dist, before
        )
        return call

    def close(self) -> None:
        """Ends torch's process group if this object has created it. This is a collective."""
        if self._mine:
            self._dist.destroy_process_group()


PEERS: dict[str, Callable[[], Peer]] = {
    p.name: p for p in (FarandolePeer, ZeroCopyPeer, GlooPeer, MpiPeer)
}
