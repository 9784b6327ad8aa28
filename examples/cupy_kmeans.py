# SPDX-License-Identifier: Apache-2.0
"""k-means on GPUs with CuPy; the points are distributed over the ranks (Lloyd, 1982).

    python examples/cupy_kmeans.py
    mpirun -np 4 python examples/cupy_kmeans.py

If the number of ranks divides 16 evenly, it ends with

    mean squared distance 15.6794
    centres identical on all ranks: yes
"""

import cupy
import numpy as np

import farandole.cupy as hvd

BLOCKS, POINTS, FEATURES, CLUSTERS, STEPS = 16, 10_000, 16, 12, 200  # POINTS per block


def make_points() -> cupy.ndarray:
    """This rank's (points, FEATURES): every size-th block of the same 160,000 points."""
    truth = np.random.default_rng(1957).normal(scale=0.8, size=(CLUSTERS, FEATURES))
    blocks = []
    for block in range(hvd.rank(), BLOCKS, hvd.size()):
        rng = np.random.default_rng(block)
        blocks.append(truth[rng.integers(CLUSTERS, size=POINTS)])
        blocks[-1] += rng.normal(size=(POINTS, FEATURES))
    return cupy.asarray(np.concatenate(blocks))


def distances(points: cupy.ndarray, centres: cupy.ndarray) -> cupy.ndarray:
    """Squared distances, shape (points, centres)."""
    squares = (points**2).sum(1)[:, None] + (centres**2).sum(1)
    return squares - 2 * points @ centres.T


def first_centres(points: cupy.ndarray) -> cupy.ndarray:
    """Points of the root's first block, each the farthest from the earlier ones (Gonzalez,
    1985)."""
    block = points[:POINTS]
    centres = block[:1]
    while len(centres) < CLUSTERS:
        farthest = distances(block, centres).min(1).argmax()
        centres = cupy.concatenate([centres, block[farthest][None]])
    return hvd.broadcast(centres, root_rank=0, name="first centres")


def step(points: cupy.ndarray, centres: cupy.ndarray) -> tuple[cupy.ndarray, float]:
    """Means of the points nearest to each centre, and the mean squared distance to that centre."""
    apart = distances(points, centres)
    mine = (apart.argmin(1)[:, None] == cupy.arange(CLUSTERS)).astype(points.dtype)
    sums, counts, inertia = hvd.grouped_allreduce(
        [mine.T @ points, mine.sum(0), apart.min(1).sum()], op=hvd.Sum, name="step"
    )
    moved = cupy.where(counts[:, None] > 0, sums / cupy.maximum(counts, 1)[:, None], centres)
    return moved, float(inertia / counts.sum())


def main() -> None:
    hvd.init()
    cupy.cuda.Device(hvd.local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    points = make_points()
    centres = first_centres(points)
    for _ in range(STEPS):
        before = centres
        centres, inertia = step(points, before)
        if float(abs(centres - before).max()) < 1e-9:
            break
    everywhere = hvd.allgather_object(cupy.asnumpy(centres).tobytes())
    if hvd.rank() == 0:
        print(f"mean squared distance {inertia:.4f}")
        print("centres identical on all ranks:", "yes" if len(set(everywhere)) == 1 else "no")


if __name__ == "__main__":
    main()
