# SPDX-License-Identifier: Apache-2.0
"""gradient_as_bucket_view on a card: gradients that are reduced in windows which NCCL knows."""

import gc

import pytest

import farandole as fd
import farandole.torch as hvd

torch = pytest.importorskip("torch")

from harness.gpu_arrays import slow  # noqa: E402
from harness.gpu_toys import assert_same, network, own_batch, reference, sgd  # noqa: E402

pytestmark = pytest.mark.ranks(2, 3)
VIEWS = {"gradient_as_bucket_view": True}
SIZES = [3, 1000, 700_000, 5]


def parameters(sizes=SIZES, dtypes=(torch.float32, torch.float64, torch.bfloat16)):
    return [
        torch.nn.Parameter(torch.zeros(n, dtype=dtype, device="cuda"))
        for dtype in dtypes
        for n in sizes
    ]


def push(ps, k):
    """A backward pass that adds k * (1 + rank) everywhere: exact in all dtypes."""
    sum((p * (k * (1.0 + hvd.rank()))).sum().double() for p in ps).backward()


def total(k, ranks=None):
    return float(sum(k * (1 + rank) for rank in ranks or range(hvd.size())))


def places(optimizer):
    return [gradient.encoding.view.tensor for gradient in optimizer._reducer.gradients]


def wrapped(ps, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), op=hvd.Sum, **VIEWS, **options)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_stay_in_their_places(set_to_none):
    ps = parameters()
    optimizer = wrapped(ps)
    for k in range(1, 4):
        optimizer.zero_grad(set_to_none=set_to_none)
        push(ps, k)
        optimizer.step()
        for p, place in zip(ps, places(optimizer), strict=True):
            assert p.grad is place
            assert p.grad.is_cuda
            assert torch.all(place == total(k))
    for p in ps:
        assert torch.all(p == -total(1 + 2 + 3))


def test_backward_on_one_stream_and_step_on_another():
    """Gradients come late: a slow kernel holds them up."""
    net = network()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **VIEWS)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(5):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            x, y = own_batch(step)
            slow(side.cuda_stream, 0.05)
            torch.nn.functional.mse_loss(net(x), y).backward()
        main.wait_stream(side)
        optimizer.step()
    assert_same(net, reference())


@pytest.mark.parametrize("keeps", [True, False])
def test_ranks_that_have_joined(keeps):
    """They keep their own gradients, or have no window left; the others go on."""
    ps = parameters()
    optimizer = wrapped(ps)
    for k in range(1, 3 + hvd.rank()):
        optimizer.zero_grad()
        push(ps, k)
        optimizer.step()
        left = [rank for rank in range(hvd.size()) if k < 3 + rank]
        assert all(torch.all(p.grad == total(k, left)) for p in ps)
    last = [p.grad.clone() for p in ps]
    if not keeps:
        del optimizer
        for p in ps:
            p.grad = None
        gc.collect()
    assert hvd.join() == hvd.size() - 1
    assert not keeps or all(torch.equal(p.grad, x) for p, x in zip(ps, last, strict=True))


@pytest.mark.ranks(3)
def test_process_sets_have_windows_of_their_own():
    pair = fd.add_process_set([0, 1])
    extra, ps = parameters([500_000], [torch.float32]), parameters()
    of_pair, of_all = wrapped(extra, process_set=pair), wrapped(ps)
    for k in range(1, 4):
        for optimizer in (of_pair, of_all):
            optimizer.zero_grad()
        push([*extra, *ps], k)
        of_pair.step()
        of_all.step()
        members = [0, 1] if hvd.rank() < 2 else [2]
        assert torch.all(extra[0].grad == total(k, members))
        assert all(torch.all(p.grad == total(k)) for p in ps)
    fd.remove_process_set(pair)


def test_own_calls_on_gradients_that_lie_there_on_some_ranks_only():
    ps = parameters([300_000], [torch.float32])
    optimizer = wrapped(ps)
    push(ps, 1)
    optimizer.step()
    for rank in range(hvd.size()):
        grad = ps[0].grad if hvd.rank() == rank else torch.zeros_like(ps[0])
        grad.fill_(7.0 + hvd.rank())
        hvd.allreduce_(grad, op=hvd.Sum, name="own")
        assert torch.all(grad == sum(7.0 + r for r in range(hvd.size())))


def test_memory_goes_back():
    """Ten windows of 256 MiB one after the other: more than some cards have, were they kept."""
    size = 64 << 20
    free = []
    for turn in range(10):
        ps = parameters([size], [torch.float32])
        optimizer = wrapped(ps)
        push(ps, turn + 1)
        optimizer.step()
        assert torch.all(ps[0].grad == total(turn + 1))
        del optimizer, ps
        gc.collect()
        torch.cuda.empty_cache()
        hvd.allreduce(torch.ones(1, device="cuda"), name="after which closed windows are forgotten")
        torch.cuda.synchronize()
        hvd.barrier()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] > free[2] - 2 * hvd.size() * 4 * size
