# SPDX-License-Identifier: Apache-2.0
"""The torch adapter on a card: all that the tests over the double cannot show of CUDA itself."""

import pytest

import farandole.torch as hvd

torch = pytest.importorskip("torch")

from harness.gpu_toys import (  # noqa: E402
    FEATURES,
    assert_same,
    joined,
    network,
    own_batch,
    reference,
    sgd,
    train,
)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"groups": 2}])
def test_as_one_rank_on_the_joined_batch(options):
    net = network()
    opt = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **options)
    assert_same(train(net, opt, own_batch), reference())


def test_backward_on_one_stream_and_step_on_another():
    net = network()
    opt = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(5):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            opt.zero_grad()
            x, y = own_batch(step)
            torch.nn.functional.mse_loss(net(x), y).backward()
        main.wait_stream(side)
        opt.step()
    assert_same(net, reference())


def test_compiled_blocks():
    net = network()
    opt = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    try:
        train(net, opt, own_batch, run=torch.compile)
    except RuntimeError as reason:  # no compiler for the machine that this runs on
        if "compiler" not in str(reason).lower():
            raise
        pytest.skip(f"needs what torch.compile needs: {reason}"[:200])
    assert_same(net, reference(), rtol=1e-6, atol=1e-8)


def test_a_backward_pass_that_a_graph_repeats():
    """With a plain optimizer: what the replay has written is reduced in place."""
    net = network()
    opt = sgd(net)
    x, y = own_batch(0)

    def backward():
        torch.nn.functional.mse_loss(net(x), y).backward()

    def reduce():
        hvd.grouped_allreduce_([p.grad for p in net.parameters()], name="captured")

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        backward()  # what libraries do once must not be captured
    main.wait_stream(side)
    reduce()
    opt.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for step in range(5):
        for static, fresh in zip((x, y), own_batch(step), strict=True):
            static.copy_(fresh)
        graph.replay()
        reduce()
        opt.step()
    assert_same(net, reference())


def test_a_capture_while_a_bucket_is_held_up():
    """In global mode, which forbids every other thread what might disturb it."""
    from harness.gpu_arrays import slow

    hvd.allreduce_(torch.ones(1000, device="cuda"), op=hvd.Sum)  # opens and loads everything
    x, y = torch.full((1000,), 1.0 + hvd.rank(), device="cuda"), torch.ones(10, device="cuda")
    slow(torch.cuda.current_stream().cuda_stream, 0.5)
    handle = hvd.allreduce_async_(x, op=hvd.Sum)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        z = y * 2
        while not hvd.poll(handle):  # our threads come to its end meanwhile
            pass
    graph.replay()
    assert hvd.synchronize(handle) is x
    assert x.tolist() == [sum(range(1, hvd.size() + 1))] * 1000
    assert z.tolist() == [2.0] * 10


def test_grad_scaler_skips_on_all_ranks_alike():
    net = network().float()
    opt = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = [p.detach().clone() for p in net.parameters()]
    for step in range(3):
        opt.zero_grad()
        x, y = own_batch(step)
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.mse_loss(net(x.float()).float(), y.float())
        scale = float("inf") if step == 0 and hvd.rank() == 0 else 1.0
        (scaler.scale(loss) * scale).backward()
        scaler.step(opt)
        scaler.update()
        moved = any(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
        assert moved == (step > 0)
    for p in net.parameters():
        assert torch.equal(hvd.allreduce(p.detach(), op=hvd.Min), p)


def test_sparse_gradients():
    torch.manual_seed(5)
    rows = torch.nn.Embedding(20, 4, sparse=True).double().cuda()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(rows.parameters(), lr=1.0), op=hvd.Sum)
    before = rows.weight.detach().clone()
    index = torch.tensor([hvd.rank(), 19], device="cuda")
    for _ in range(3):
        opt.zero_grad()
        rows(index).sum().backward()
        opt.step()
    moved = before - rows.weight.detach()
    for r in range(20):
        times = 3.0 * (hvd.size() if r == 19 else r < hvd.size())
        torch.testing.assert_close(moved[r], torch.full((4,), times).double().cuda())


def test_sync_batch_norm():
    layers = torch.nn.Linear(FEATURES, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
    alone = network(*layers)
    torch.manual_seed(3)
    copy = hvd.convert_sync_batchnorm(torch.nn.Sequential(*[_copy(m) for m in alone]))
    opt = hvd.DistributedOptimizer(sgd(copy), copy.named_parameters())
    train(copy, opt, own_batch)
    train(alone, sgd(alone), joined)
    assert_same(copy, alone)


def _copy(module):
    import copy

    return copy.deepcopy(module)


def test_broadcasts_make_ranks_equal():
    torch.manual_seed(hvd.rank())
    net = torch.nn.Linear(FEATURES, FEATURES).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=0.1 * (1 + hvd.rank()))
    net(torch.randn(4, FEATURES, device="cuda")).sum().backward()
    opt.step()
    hvd.broadcast_parameters(net.state_dict(), 0)
    hvd.broadcast_optimizer_state(opt, 0)
    state = [v for p in net.parameters() for v in opt.state[p].values()]
    for x in [*net.parameters(), *state]:
        assert torch.equal(hvd.allreduce(x.detach(), op=hvd.Min), x.detach())
    assert opt.param_groups[0]["lr"] == 0.1


def test_compression_and_autograd():
    x = torch.full((1000,), 1.0 + hvd.rank(), device="cuda", requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16)
    total = hvd.size() * (hvd.size() + 1) / 2
    assert torch.all(y == total)
    (y * (1 + hvd.rank())).sum().backward()
    assert torch.all(x.grad == total)
